import torch

from torchsbp.study.augment import NUMBERS, Augment, jittered, mixed, warped, with_hole


def numbers(images):
    return torch.rand(NUMBERS, images, generator=torch.Generator().manual_seed(0))


def test_the_same_numbers_give_the_same_images():
    x, y = torch.rand(8, 3, 16, 16), torch.arange(8) % 2
    a, b = (Augment()(x, y, 2, numbers(8)) for _ in range(2))
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    torch.testing.assert_close(a[1].sum(1), torch.ones(8))


def test_every_number_is_used():
    """Labels follow from the last two, images from all."""
    x, y = torch.rand(8, 3, 16, 16), torch.arange(8) % 2
    plain = Augment()(x, y, 2, numbers(8))[0]
    for i in range(NUMBERS):
        other = numbers(8)
        other[i] = 1 - other[i]
        assert not torch.equal(Augment()(x, y, 2, other)[0], plain)
    assert list(Augment()(x, y, 2, numbers(8)[:NUMBERS])[0].shape) == [8, 3, 16, 16]


def test_images_that_are_not_turned_keep_their_pixels():
    x = torch.rand(32, 3, 8, 8)
    for before, after in zip(x, warped(x, 0, 0.0, iter(numbers(32))), strict=True):
        assert min((after - before).abs().max(), (after - before.flip(2)).abs().max()) < 1e-5


def test_holes_are_squares_of_the_given_side():
    holes = (with_hole(torch.ones(200, 3, 16, 16), 0.5, iter(numbers(200)))[:, 0] == 0.5).sum((1, 2))
    assert holes.max() == 64
    assert holes.min() >= 16


def test_jitter_of_nothing_is_nothing_and_mixing_keeps_means():
    x, targets = torch.rand(64, 3, 4, 4), torch.rand(64, 5)
    torch.testing.assert_close(jittered(x, 0.0, iter(numbers(64))), x)
    images, labels = mixed(x, targets, 1.0, iter(numbers(64)))
    assert not torch.equal(images, x)
    part = (labels - targets).abs().sum()
    assert part > 0
    assert all(torch.equal(a, b) for a, b in zip(mixed(x, targets, 0.0, iter(numbers(64))), (x, targets), strict=True))

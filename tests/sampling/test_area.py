"""Images of unequal sizes in a padded batch: kept positions lie in them, equally many in each."""

import pytest
import timm
import torch
from torch import Tensor, nn

import torchsbp
from torchsbp.sampling import area

from ..adapters.wrappers import WRAPPERS
from ..steps import GRID

PADDED = (64, 96)
SIZES = [(64, 96), (40, 96), (64, 50), (33, 65)]


def backbone(name: str = "timm convnext") -> nn.Module:
    return WRAPPERS[name].model()


def images(batch: int = len(SIZES)) -> Tensor:
    return WRAPPERS["timm convnext"].images(batch)


def grids(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Of every sampled module, as its name says."""
    strides = {"stages_0": 4, "stages_1": 8, "stages_2": 16}
    found = {}
    for name in torchsbp.kept(model):
        stride = next(s for stage, s in strides.items() if stage in name)
        found[name] = PADDED[0] // stride, PADDED[1] // stride
    return found


def test_a_position_belongs_to_the_image_if_it_sees_a_pixel_of_it():
    found = ~area.outside(area.Images(torch.tensor([[64, 96], [33, 1], [32, 32]]), PADDED), (2, 3))
    assert found.tolist() == [[True] * 6, [True, False, False] * 2, [True, False, False, False, False, False]]


def test_frames_are_padded_in_height_and_width_alone():
    found = ~area.outside(area.Images(torch.tensor([[32, 64]]), (64, 64)), (2, 2, 2))
    assert found.view(2, 4).tolist() == [[True, True, False, False]] * 2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sampler": "random"},
        {"per_sample": True},
        {"per_sample": "balanced"},
        {"per_block": True, "exact_downsampling": True},
        {"keep_ratio": 0.25},
    ],
)
def test_kept_rows_lie_in_the_images_and_are_equally_many(options):
    model = torchsbp.apply(backbone(), config=GRID, **options)
    plain = torchsbp.apply(backbone(), config=GRID, **options)
    plain(images())
    for _ in range(3):
        torchsbp.set_sizes(model, SIZES, PADDED)
        model(images())
        for (name, kept), without in zip(torchsbp.kept(model).items(), torchsbp.kept(plain).values(), strict=True):
            inside = ~area.outside(area.Images(torch.tensor(SIZES), PADDED), grids(model)[name])
            assert kept.shape == without.shape
            assert all(len(row.unique()) == kept.shape[1] for row in kept)
            for row, own in zip(kept, inside, strict=True):
                assert int(own[row].sum()) == min(kept.shape[1], int(own.sum())), name


def test_an_image_that_fills_the_batch_keeps_what_it_would_without_sizes():
    model, plain = (torchsbp.apply(backbone(), config=GRID) for _ in range(2))
    torchsbp.set_sizes(model, [PADDED] * 2, PADDED)
    model(images(2))
    plain(images(2))
    for name, kept in torchsbp.kept(plain).items():
        assert torch.equal(torchsbp.kept(model)[name], kept)


def test_sizes_count_for_one_forward():
    model = torchsbp.apply(backbone(), config=GRID)
    torchsbp.set_sizes(model, [(64, 60)] * 2, PADDED)
    last = []
    for _ in range(2):
        model(images(2))
        last.append(int((torchsbp.kept(model)["body.stages_0.blocks.0"] % 24).max()))
    assert last == [14, 23]  # columns, of which the images have 15


def test_all_of_an_image_is_visited():
    model = torchsbp.apply(backbone(), 0.25, config=GRID)
    seen: set[int] = set()
    for _ in range(64):
        torchsbp.set_sizes(model, [(48, 64)], PADDED)
        model(images(1))
        seen |= set(torchsbp.kept(model)["body.stages_2.blocks.0"][0].tolist())
    assert seen == {i * 6 + j for i in range(3) for j in range(4)}


@pytest.mark.parametrize("name", ["timm convnext", "timm swin padded", "timm vit", "torchvision convnext layers"])
def test_gradients_are_those_of_the_gated_twin(name):
    model = torchsbp.apply(backbone(name), config=GRID)
    x = WRAPPERS[name].images(2)
    height, width = x.shape[-2:]
    torchsbp.set_sizes(model, [(height, width // 2), (height - 9, width)], (height, width))
    found = torchsbp.check(model, x)
    assert found.passed, found


def test_padding_is_last_in_windows():
    model = torchsbp.apply(backbone("timm swin padded"), config=GRID)
    torchsbp.set_sizes(model, [(36, 24)], (36, 52))
    model(WRAPPERS["timm swin padded"].images(1))
    kept = torchsbp.kept(model)["body.layers_0.blocks.0"][0]  # windows of 5 × 5 in a grid of 9 × 13
    columns = kept % 13
    first = columns[columns < 5]
    assert len(first) == 12 + 10  # two windows, of 25 and 20 positions, that are image alone keep half of it
    assert (columns[(columns >= 5) & (columns < 10)] == 5).sum() == 5 + 4  # and those with a column of image all of it


@pytest.mark.parametrize(
    "sizes", [[(64, 97)], [(0, 5)], [64, 96], torch.ones(2, 3, dtype=torch.int64), torch.ones(1, 2)]
)
def test_sizes_that_are_none_are_refused(sizes):
    model = torchsbp.apply(backbone(), keep_ratio=0.5)
    with pytest.raises(ValueError, match=r"allowed: \(height, width\) of every image"):
        torchsbp.set_sizes(model, sizes, PADDED)


@pytest.mark.parametrize("options", [{}, {"scale": "weight"}], ids=str)
def test_weights_that_do_not_know_of_sizes_are_refused(options):
    model = torchsbp.apply(backbone(), 0.5, **options)
    with pytest.raises(ValueError, match='apply with scale="none", or leave set_sizes out'):
        torchsbp.set_sizes(model, [PADDED], PADDED)


@pytest.mark.parametrize("options", [{"keep_ratio": 1}, {"keep_ratio": 0.5, "scale": "none"}], ids=str)
def test_without_weights_they_are_not(options):
    model = torchsbp.apply(backbone(), **options)
    torchsbp.set_sizes(model, SIZES, PADDED)
    assert torchsbp.check(model, images()).passed


def test_as_many_sizes_as_images():
    model = torchsbp.apply(backbone(), config=GRID)
    torchsbp.set_sizes(model, [PADDED], PADDED)
    with pytest.raises(ValueError, match="told of 1 images, the model was given 2"):
        model(images(2))
    model(images(2))  # the wrong sizes are forgotten


def test_another_size_of_images_compiles_nothing_anew():
    model = torchsbp.apply(timm.create_model("convnext_atto", features_only=True), config=GRID).train()
    counted: list[object] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        counted.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=count, fullgraph=True, dynamic=False)
    for sizes in ([(64, 96), (32, 40)], [(50, 60), (64, 20)], [(7, 9), (64, 96)]):
        torchsbp.set_sizes(model, sizes, PADDED)
        compiled(torch.randn(2, 3, *PADDED))
    assert len(counted) == 1

"""Proposals: torchvision's losses, gradients from the sampled anchors alone, nothing of the padding."""

import torch
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import RegionProposalNetwork

from torchsbp.train.detection import rpn as R

from .detectors import SIZES, detector, images, objects

LISTED = [tuple(size) for size in SIZES.tolist()]


def step(sparse: bool, sizes=LISTED) -> tuple[dict, dict, list]:
    model = detector(sparse=sparse)
    features = model.backbone(images())
    torch.manual_seed(7)
    proposals, losses = model.rpn(ImageList(images(), sizes), features, objects())
    sum(losses.values()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return losses, gradients, proposals


def test_backward_from_the_sampled_anchors_alone_is_exact():
    (losses, gradients, proposals), (dense, expected, same) = step(True), step(False)
    assert all(torch.equal(a, b) for a, b in zip(proposals, same, strict=True))
    for name, loss in dense.items():
        torch.testing.assert_close(losses[name], loss, rtol=1e-12, atol=0)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_it_saves_a_fraction():
    sizes = {}
    for sparse in (False, True):
        model = detector(sparse=sparse)
        features = {name: its.detach().requires_grad_() for name, its in model.backbone(images()).items()}
        saved: dict[int, int] = {}

        def pack(x: torch.Tensor, saved=saved) -> torch.Tensor:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model.rpn(ImageList(images(), LISTED), features, objects())
        maps = {its.untyped_storage().data_ptr() for its in features.values()}
        sizes[sparse] = maps & set(saved)
    assert len(sizes[False]) == 5  # the convolution's inputs
    assert not sizes[True]


def test_losses_are_torchvisions_where_nothing_is_padded():
    model = detector()
    whole = [tuple(images().shape[-2:])] * 2
    features = model.backbone(images())
    torch.manual_seed(7)
    _, found = model.rpn(ImageList(images(), whole), features, objects())
    torch.manual_seed(7)
    _, expected = RegionProposalNetwork.forward(model.rpn, ImageList(images(), whole), features, objects())
    torch.testing.assert_close(found["objectness"], expected["loss_objectness"], rtol=1e-6, atol=0)
    torch.testing.assert_close(found["proposals"], expected["loss_rpn_box_reg"], rtol=1e-6, atol=0)


def test_anchors_of_the_padding_are_not_sampled(monkeypatch):
    model = detector()
    seen = []
    sample = model.rpn.fg_bg_sampler
    monkeypatch.setattr(model.rpn, "fg_bg_sampler", lambda labels: seen.extend(labels) or sample(labels))
    listed = ImageList(images(), LISTED)
    features = model.backbone(images())
    model.rpn(listed, features, objects())
    anchors = model.rpn.anchor_generator(listed, list(features.values()))
    for label, anchor, (height, width) in zip(seen, anchors, LISTED, strict=True):
        x, y = (anchor[:, 0] + anchor[:, 2]) / 2, (anchor[:, 1] + anchor[:, 3]) / 2
        outside = (x > width) | (y > height)
        assert bool((label[outside] == -1).all())
        assert bool((label[~outside] == 0).any())


def test_surroundings_are_a_convolutions():
    maps = [torch.randn(2, 4, 5, 6, dtype=torch.float64), torch.randn(2, 4, 2, 3, dtype=torch.float64)]
    weight = torch.randn(3, 4, 3, 3, dtype=torch.float64)
    dense = torch.cat([torch.nn.functional.conv2d(x, weight, padding=1).flatten(2) for x in maps], 2)
    rows = torch.cat([x.flatten(2) for x in maps], 2).transpose(1, 2)
    found = R.surroundings(rows, ((5, 6), (2, 3)), torch.arange(2 * 36))
    expected = dense.transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(found.flatten(1) @ weight.permute(0, 2, 3, 1).flatten(1).T, expected)


def test_without_anchors_there_is_no_loss():
    losses = R.rpn_losses(torch.zeros(0), torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, 4), 0.0)
    assert {name: float(loss) for name, loss in losses.items()} == {"objectness": 0.0, "proposals": 0.0}

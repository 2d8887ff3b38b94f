"""Video models: every sampler and scope against the gated model, and whole frames across windows, shifts and stages."""

import pytest
import torch
from torchvision.models.video.swin_transformer import SwinTransformer3d, swin3d_t

import torchsbp
from torchsbp import SBPConfig

from ..models import WINDOWS
from ..oracle import check_definition

SAMPLERS = ["frames", "frames_jitter", "checkerboard", "grid", "random", "stratified"]


@pytest.mark.parametrize("name", ["video swin", "video swin, padded"])
@pytest.mark.parametrize("scope", ["branch", "block"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_gradients_are_those_of_the_gated_model(name, scope, sampler):
    """In float64, in shifted blocks and unshifted ones; the second has grids that windows don't divide."""
    family = WINDOWS[name]
    model = family.model(drop_path=0.3)
    check_definition(model, SBPConfig(keep_ratio=0.5, sampler=sampler, scope=scope), family.images())


@pytest.mark.slow
@pytest.mark.parametrize("size", [(16, 112, 112), (18, 72, 60)])
@pytest.mark.parametrize("scope", ["branch", "block"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_gradients_of_swin3d_t(size, scope, sampler):
    """As torchvision makes it, in float64; the grids of the second size are padded in every stage and dimension."""
    torch.manual_seed(0)
    model = swin3d_t().double().train()
    clip = torch.randn(1, 3, *size, dtype=torch.float64)
    check_definition(model, SBPConfig(keep_ratio=0.5, sampler=sampler, scope=scope), clip)


@pytest.mark.parametrize("sampler", ["frames", "random"])
def test_masks_per_sample(sampler):
    family = WINDOWS["video swin, padded"]
    config = SBPConfig(keep_ratio=0.25, sampler=sampler, per_sample=True)
    check_definition(family.model(), config, family.images(3))


def whole_frames(frames: int, size: int, ratio: float, sampler: str = "frames", steps: int = 8) -> set[tuple[int, ...]]:
    """Which frames each site of a narrow Video Swin keeps in some steps; all sites the same, no frame in part."""
    model = SwinTransformer3d([2, 4, 4], 8, [2, 2, 2, 1], [1, 1, 1, 1], [8, 7, 7], stochastic_depth_prob=0.0)
    torchsbp.apply(model, ratio, sampler=sampler)
    found = set()
    for _ in range(steps):
        model(torch.zeros(1, 3, frames, size, size))
        for name, positions in torchsbp.kept(model).items():
            side = -(-size // 4)
            for _ in range(int(name.split(".")[1]) // 2):
                side = -(-side // 2)
            number, counts = (positions[0] // side**2).unique(return_counts=True)
            assert (counts == side**2).all(), (name, counts.tolist())
            found.add(tuple(number.tolist()))
    return found


@pytest.mark.parametrize("ratio, stride", [(0.5, 2), (0.25, 4), (0.125, 8)])
def test_whole_frames_in_every_block(ratio, stride):
    """The recipes' windows and number of frames: 16 in the grid, 8 in a window, shifted by 4 in every second block."""
    expected = {tuple(range(phase, 16, stride)) for phase in range(stride)}
    found = whole_frames(32, 112, ratio)
    assert found <= expected
    assert len(found) > 1


@pytest.mark.parametrize("frames, size, ratio", [(32, 100, 0.5), (32, 128, 0.25), (16, 64, 0.5), (24, 112, 0.25)])
def test_whole_frames_where_windows_are_padded(frames, size, ratio):
    whole_frames(frames, size, ratio, steps=4)

"""What the report shows as kept: the frames and positions that gradients reached in the last step."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

import torchsbp
from torchsbp.cli.recipe import parse
from torchsbp.train.distributed import Processes
from torchsbp.train.loop import Trainer
from torchsbp.train.video.kept import kept_cells
from torchsbp.train.video.picture import DIM, GAP, SIDE, strip

from .test_video import FRAMES, MODELS, VIT, recipe_of, trainer_of


@pytest.mark.parametrize("per_sample", [False, True, "balanced"])
def test_frames_of_an_image_model(tmp_path, per_sample):
    path = recipe_of(tmp_path, "vit_tiny_patch16_224", VIT, {**FRAMES, "per_sample": per_sample})
    trainer = Trainer(parse("train", [path]), Processes(torch.device("cpu")))
    trainer.model.train()
    shown = []
    for step in range(6):
        trainer.task.set_step(trainer.model, step)
        clips = torch.rand(3, 3, 8, 32, 32, requires_grad=True)
        trainer.model(clips).sum().backward()
        reached = clips.grad[0].abs().sum((0, 2, 3)) > 0
        cells = kept_cells(trainer.model, 8)
        assert cells.shape == (8, 1, 1)
        assert cells.flatten().bool().tolist() == reached.tolist()
        shown.append(tuple(reached.tolist()))
    assert len(set(shown)) > 1
    with torch.no_grad():  # as when the report is written
        assert tuple(kept_cells(trainer.model, 8).flatten().bool().tolist()) == shown[-1]


def test_positions_of_an_image_model_are_of_every_frame(tmp_path):
    """The class token is not among them."""
    trainer = Trainer(parse("train", [recipe_of(tmp_path, *MODELS["tokens of a ViT"])]), Processes(torch.device("cpu")))
    assert kept_cells(trainer.model, 8) is None  # nothing was sampled yet
    trainer.model.train()(torch.rand(2, 3, 8, 32, 32))
    positions = next(iter(torchsbp.kept(trainer.model).values()))
    assert positions.shape == (2 * 8, 1 + 8)
    cells = kept_cells(trainer.model, 8)
    assert cells.shape == (8, 4, 4)
    expected = [[1 + int(i) for i in frame.flatten().nonzero()] for frame in cells]
    assert expected == positions[:8, 1:].tolist()


@pytest.mark.parametrize("blocks, grid", [(0.7, (4, 8, 8)), ([2, 3], (4, 2, 2))])
def test_positions_of_a_video_model_are_those_of_its_first_sampled_stage(tmp_path, blocks, grid):
    trainer = trainer_of(tmp_path, sbp={"sampler": "checkerboard", "blocks": blocks})
    trainer.model.train()(torch.rand(2, 3, 8, 32, 32))
    cells = kept_cells(trainer.model, 8)
    assert cells.shape == grid
    positions = next(iter(torchsbp.kept(trainer.model).values()))[0]
    assert cells.flatten().nonzero().flatten().tolist() == positions.tolist()


def test_what_is_chosen_in_backward_is_not_shown(tmp_path):
    trainer = trainer_of(tmp_path, sbp={"sampler": "norm"})
    trainer.model.train()(torch.rand(2, 3, 8, 32, 32)).sum().backward()
    assert kept_cells(trainer.model, 8) is None


def test_a_picture_is_dark_where_nothing_is_kept():
    cells = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])  # [2, 1, 2]
    png = strip(torch.ones(3, 4, 16, 16), cells)
    board = np.asarray(Image.open(io.BytesIO(png)))[..., 0]
    assert board.shape == (2 * SIDE + GAP, 4 * (SIDE + GAP) - GAP)
    assert board[:SIDE, :SIDE] == pytest.approx(255, abs=1)
    dark = int(255 * DIM)
    for column in range(4):
        frame = board[SIDE + GAP :, column * (SIDE + GAP) :]
        left, right = (255, dark) if column < 2 else (dark, 255)
        assert (frame[:, 40], frame[:, 72]) == (pytest.approx(left, abs=1), pytest.approx(right, abs=1))

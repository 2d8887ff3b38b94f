"""Runs of one seed are pairs; every arm trains."""

import re
from pathlib import Path

import pytest
import torch

from torchsbp.study.arms import ARMS, GRIDS, enters
from torchsbp.study.models import MODELS, build
from torchsbp.study.plan import CONTEST, Plan
from torchsbp.study.training import Data, Run, Settings, Training, schedule, train

TOY = Settings(batch=16, compile=False, size="toy", evaluations=2)
CASES = [(model, arm) for model in ("vit", "convnext", "swin") for arm in ARMS if enters(model, arm)]


def losses(data, model, arm, epochs=2):
    return [row["loss"] for row in train(Run(model, arm, epochs=epochs), TOY, Data.load(data))]


@pytest.mark.parametrize("model", ["vit", "convnext", "swin"])
def test_exact_arms_train_the_same_model(data, model):
    full = losses(data, model, "full")
    assert len(full) == 2
    assert losses(data, model, "exact") == pytest.approx(full, rel=2e-3)
    assert losses(data, model, "checkpoint") == pytest.approx(full, rel=1e-5)


@pytest.mark.parametrize("model, arm", CASES)
def test_every_arm_takes_a_step(data, model, arm):
    training = Training(Run(model, arm), TOY, Data.load(data))
    before = [p.detach().clone() for p in training.model.parameters()]
    loss = training.step(torch.arange(training.batch), 1e-3)
    assert 0.3 < float(loss) < 3
    assert all(bool((p != q).any()) for p, q in zip(training.model.parameters(), before, strict=True))


def test_two_runs_in_turn_are_those_of_one_after_the_other(data):
    runs = [train(Run("vit", "grid 0.5", epochs=2, drop_path=0.5), TOY, Data.load(data)) for _ in range(2)]
    in_turn = [[row["loss"] for row in rows] for rows in zip(*runs, strict=True)]
    assert all(a == b for a, b in in_turn)


def test_another_order_begins_at_the_same_weights(data):
    a, b = (Training(Run("vit", arm), TOY, Data.load(data)) for arm in ("full", "other order"))
    assert all(torch.equal(p, q) for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True))
    assert a.epoch(0) != b.epoch(0)


def test_the_schedule_warms_up_and_ends_at_zero():
    assert [round(schedule(p, 0.1), 4) for p in (0, 0.05, 0.1, 0.55, 1)] == [0, 0.5, 1, 0.5, 0]


def test_grids_and_contest_name_arms():
    assert {arm for grid in GRIDS.values() for arm in grid.values()} | set(CONTEST) <= set(ARMS)
    plan = Plan(("vit",), ("full", "exact", "down exact 0.5"))
    assert plan.arms_of("vit") == ["full"]
    assert plan.arms_of("vit", trained=False) == ["full", "exact"]


def test_the_calls_for_a_gpu_name_arms():
    script = (Path(__file__).parents[2] / "benchmarks" / "contest.sh").read_text()
    lists = re.findall(r'^\w+="([^"$]*;[^"$]*)"|--arms "(\w[^"$]*;[^"$]*)"', script, re.M)
    names = {arm for a, b in lists for arm in (a or b).split(";")}
    assert len(names) == 15
    assert names <= set(ARMS)


def test_larger_images_have_larger_patches():
    vit, convnext, swin = (build(name, "toy", 128, 10, drop_path_rate=0.0) for name in ("vit", "convnext", "swin"))
    assert (vit.patch_embed.num_patches, convnext.stem[0].stride, swin.patch_embed.grid_size) == (256, (4, 4), (16, 16))


def test_the_first_images_alone(data):
    loaded = Data.load(data, images=40)
    assert (len(loaded.x_train), len(loaded.y_train), len(loaded.x_test)) == (40, 40, 8)


def test_models_have_five_to_nine_million_parameters():
    sizes = {
        name: sum(p.numel() for p in build(name, "full", 32, 10, drop_path_rate=0.0).parameters()) for name in MODELS
    }
    assert all(5e6 < sizes[name] < 9e6 for name in ("vit", "convnext", "swin")), sizes

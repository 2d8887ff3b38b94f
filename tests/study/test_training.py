"""Runs of one seed are pairs; every arm trains."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchsbp import kept
from torchsbp.study import saved
from torchsbp.study import training as training_module
from torchsbp.study.arms import ARMS, GRIDS, enters
from torchsbp.study.data import Data
from torchsbp.study.models import MODELS, build
from torchsbp.study.plan import CONTEST, Plan
from torchsbp.study.training import Run, Settings, Training, train

TOY = Settings(batch=16, compile=False, size="toy")
CASES = [(model, arm) for model in ("vit", "convnext", "swin") for arm in ARMS if enters(model, arm)]
CASES += [("hybrid", arm) for arm in ("full", "exact", "own rows 0.5", "patches ½")]


def losses(data, model, arm, epochs=2):
    training = Training(Run(model, arm, epochs=epochs), TOY, Data.load(data))
    return [training.epoch(number) for number in range(epochs)]


@pytest.mark.parametrize("model", ["vit", "hybrid", "pooled", "convnext", "swin"])
def test_exact_arms_train_the_same_model(data, model):
    full = losses(data, model, "full")
    assert losses(data, model, "exact") == pytest.approx(full, rel=2e-3)
    assert losses(data, model, "checkpoint") == pytest.approx(full, rel=1e-5)


def test_a_long_run_says_how_far_it_is(data, monkeypatch, capsys):
    found = losses(data, "vit", "full")
    assert capsys.readouterr().out == ""  # it was too short
    monkeypatch.setattr(training_module, "TOLD_EVERY", 0.0)
    losses(data, "vit", "full")
    run = "vit, full, 2 epochs, lr 1, drop path 0, seed 0"
    expected = [f"{run}: epoch {i + 1} of 2, loss {loss:.3f}" for i, loss in enumerate(found)]
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.parametrize("model, arm", CASES)
def test_every_arm_takes_a_step(data, model, arm):
    training = Training(Run(model, arm), TOY, Data.load(data))
    before = [p.detach().clone() for p in training.model.parameters()]
    training.fill(0, 1)
    training.step()
    assert 0.3 < float(training.loss) < 3
    assert all(bool((p != q).any()) for p, q in zip(training.model.parameters(), before, strict=True))


def test_an_arm_may_keep_all_where_the_rate_falls(data):
    """Sampled as its sibling until then."""
    changing, sampled = (
        Training(Run("vit", arm, epochs=5), TOY, Data.load(data))
        for arm in ("own rows 0.5, then exact", "own rows 0.5")
    )
    turn = TOY.turn(5)
    assert 0 < turn < 5
    for number in range(5):
        losses = [training.epoch(number) for training in (changing, sampled)]
        assert (losses[0] == losses[1]) is (number < turn)
        counts = {its.shape[1] for its in kept(changing.model).values()}
        assert counts == ({positions(changing)} if number >= turn else {positions(sampled) // 2 + 1})


def positions(training):
    return training.model.pos_embed.shape[1]


def test_two_runs_in_turn_are_those_of_one_after_the_other(data):
    runs = [Training(Run("vit", "grid 0.5", epochs=2, drop_path=0.5), TOY, Data.load(data)) for _ in range(2)]
    assert all(a.epoch(number) == b.epoch(number) for number in range(2) for a, b in [runs])


def test_a_shorter_run_is_the_beginning_of_a_longer_one(data):
    """It has its own end; the longer one goes on as if it had not been there."""
    loaded = Data.load(data)
    alone = [row for epochs in (2, 5) for row in train(Run("vit", "own rows 0.5", epochs=epochs), TOY, loaded)]
    both = list(train(Run("vit", "own rows 0.5", epochs=5, shorter=(2,)), TOY, loaded))
    assert [(row["epoch"], row["loss"], row["accuracy"]) for row in both] == [
        (row["epoch"], row["loss"], row["accuracy"]) for row in alone
    ]


def test_runs_of_an_arm_share_a_training(data):
    """Another seed and rate, and back: as if it had just been made."""
    first, other = Run("vit", "own rows 0.5", epochs=2), Run("vit", "own rows 0.5", seed=1, epochs=1, lr=2.0)
    training = Training(other, TOY, Data.load(data))
    found = [[row["loss"] for row in train(run, TOY, training.data, training)] for run in (first, other, first)]
    assert found[0] == found[2] == [row["loss"] for row in train(first, TOY, training.data)]
    assert found[1] != found[0]


@pytest.mark.parametrize("stopped", [2, 4])
def test_a_run_that_was_stopped_goes_on(data, tmp_path, monkeypatch, stopped):
    monkeypatch.setattr(saved, "EVERY", 0.0)
    run, file = Run("vit", "own rows 0.5", epochs=5, shorter=(2,)), tmp_path / "states" / "run.pt"
    training = Training(run, TOY, Data.load(data))
    whole = [row["loss"] for row in train(run, TOY, training.data)]
    for number in range(stopped):
        training.epoch(number)
    saved.Saved(file).save(training, stopped)
    again = [row["loss"] for row in train(run, TOY, training.data, file=file)]
    assert again == whole[1:]
    assert not file.exists()


def test_a_state_of_other_settings_is_left_alone(data, tmp_path):
    run, file = Run("vit", "full", epochs=2), tmp_path / "run.pt"
    training = Training(run, TOY, Data.load(data))
    its = saved.Saved(file)
    its.last -= saved.EVERY
    its.save(training, 1)
    assert its.load(training) == 1
    assert its.load(Training(run, replace(TOY, clip=2.0), training.data)) == 0


def test_seeds_have_masks_of_their_own(data):
    training = Training(Run("vit", "own rows 0.5"), TOY, Data.load(data))
    found = []
    for seed in (0, 1, 0):
        training.begin(Run("vit", "own rows 0.5", seed=seed))
        training.fill(0, 1)
        training.step()
        found.append(torch.cat([its.flatten() for its in kept(training.model).values()]))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_another_order_begins_at_the_same_weights(data):
    a, b = (Training(Run("vit", arm), TOY, Data.load(data)) for arm in ("full", "other order"))
    assert all(torch.equal(p, q) for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True))
    assert a.epoch(0) != b.epoch(0)


def test_rates_warm_up_stay_and_fall_to_zero():
    settings = Settings(warmup=2.0, decay=0.4)
    assert [round(settings.rate(epoch, 10), 4) for epoch in (0, 1, 2, 6, 8, 10)] == [0, 0.5, 1, 1, 0.5, 0]
    assert all(settings.rate(epoch, 10) == settings.rate(epoch, 30) for epoch in (0.5, 3, 6))


def test_grids_and_contest_name_arms():
    assert {arm for grid in GRIDS.values() for arm in grid.values()} | set(CONTEST) <= set(ARMS)
    plan = Plan(("vit",), ("full", "exact", "down exact 0.5"))
    assert plan.arms_of("vit") == ["full", "exact"]


def test_lengths_may_differ_by_model_and_settings_begin_from_what_is_best():
    plan = Plan(("vit", "swin"), epochs={"vit": (20, 10), "": (5,)}, lr=(0.5, 2.0), tuned={("vit", "full"): (3.0, 0.2)})
    assert (plan.lengths("vit"), plan.lengths("swin")) == ((10, 20), (5,))
    assert plan.settings("vit", "own rows 0.5") == [(1.5, 0.2), (6.0, 0.2)]
    assert plan.settings("swin", "full") == [(0.5, 0.0), (2.0, 0.0)]
    assert replace(plan, drop_path=(0.0,)).settings("vit", "full") == [(1.5, 0.0), (6.0, 0.0)]


def test_the_calls_for_a_gpu_name_arms():
    script = (Path(__file__).parents[2] / "benchmarks" / "contest.sh").read_text()
    lists = re.findall(r'^(?:first|others)="(.*)"$|--arms "(\w[^"$]*)"|\{ARMS:-([^}]*)\}', script, re.M)
    names = {arm for texts in lists for arm in ";".join(texts).strip(";").split(";")}
    assert len(names) == 14
    assert names <= set(ARMS)


def test_larger_images_have_larger_patches():
    vit, convnext, swin = (build(name, "toy", 128, 10, drop_path_rate=0.0) for name in ("vit", "convnext", "swin"))
    assert (vit.patch_embed.num_patches, convnext.stem[3].stride, swin.patch_embed.grid_size) == (256, (4, 4), (32, 32))


def test_the_first_images_alone(data):
    loaded = Data.load(data, images=40)
    assert (len(loaded.x_train), len(loaded.y_train), len(loaded.x_test)) == (40, 40, 8)


def test_models_have_five_to_seven_million_parameters():
    sizes = {
        name: sum(p.numel() for p in build(name, "full", 32, 10, drop_path_rate=0.0).parameters()) for name in MODELS
    }
    assert all(4.5e6 < sizes[name] < 7e6 for name in ("vit", "hybrid", "pooled", "convnext", "swin")), sizes

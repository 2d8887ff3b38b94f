"""Recipes of video: the published values, and a step of their training."""

from dataclasses import replace

import pytest

from torchsbp.cli.recipe import RECIPES, parse, recipes

from ...steps import GRID
from ..runs import lines, train
from ..test_recipes import SMALL
from .runs import SWIN, listed
from .test_video import epic

KINETICS = [name for name in recipes() if name.startswith("kinetics400/")]
EPIC = [name for name in recipes() if name.startswith("epic55/")]
PUBLISHED = {  # lr, weight decay, drop path, global batch, top-1
    "tiny": (2.5e-4, 0.02, 0.1, 16, "78.8 %"),
    "base": (1.5e-4, 0.05, 0.2, 32, "82.7 %"),
}


@pytest.mark.parametrize("name", KINETICS)
def test_kinetics_is_set_as_published(name):
    config = parse("train", [name])
    size = name.split("_")[1]
    lr, decay, drop_path, batch, top1 = PUBLISHED[size]
    model, data, optimizer = config.task.model, config.task.data, config.optimizer
    assert model.name == f"swin3d_{size[0]}"
    assert (model.drop_path, model.dropout, model.lr) == (drop_path, 0.5, 0.1)
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay) == ("adamw", lr, decay)
    assert (data.frames, data.stride, data.size) == (32, 2, 224)
    assert (config.epochs, config.batch, config.schedule.warmup_epochs, config.schedule.name) == (
        30,
        batch,
        2.5,
        "cosine",
    )
    assert all(config.accumulate(processes) for processes in (1, 2, 4, 8))
    assert top1 in (RECIPES / f"{name}.yaml").read_text()
    ratio = {"sbp2": 0.5, "sbp4": 0.25, "sbp8": 0.125}.get(name.split("_")[-1])
    wanted = None if ratio is None else replace(GRID, keep_ratio=ratio, sampler="frames", scope="block")
    assert config.sbp.build(0, 10) == wanted


@pytest.mark.parametrize("name", [*KINETICS, *EPIC])
def test_a_recipe_trains(name, tmp_path):
    """Its own settings, on a few small clips and a smaller model of its family."""
    root = listed(tmp_path / "data") if name in KINETICS else epic(tmp_path / "data")
    options = [f"--task.model.options.{key}={value}" for key, value in SWIN.items()]
    options += [f"--task.data.root={root}", "--task.data.frames=16", "--task.data.stride=1", "--task.data.size=32"]
    if name in EPIC:
        options += ["--task.data.train=labels.csv", "--task.data.valid=labels.csv"]
    options += ["--epochs=1", "--schedule.warmup_epochs=0", "--batch=2", "--micro_batch=2", "--log.tensorboard=false"]
    assert train([name, *SMALL, *options, f"--out={tmp_path / 'run'}"]) == 0
    assert [line["kind"] for line in lines(tmp_path / "run")] == ["run", "train", "valid", "end"]


@pytest.mark.slow
def test_motions_are_learned_with_sbp(tmp_path):
    options = ["--sbp.preset=fast", "--sbp.sampler=frames", "--log.progress=false"]
    assert train(["motions", *options, f"--out={tmp_path / 'run'}"]) == 0
    assert lines(tmp_path / "run")[-2]["top1"] > 80

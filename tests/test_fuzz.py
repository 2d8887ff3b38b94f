"""Generated configurations and arguments: success or an error of ours, and never a changed model. Bounded in time."""

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchsbp
from torchsbp import SBPConfig, schedules
from torchsbp.cli.main import main
from torchsbp.cli.recipe import parse
from torchsbp.errors import UsageError
from torchsbp.patching.site import Site
from torchsbp.train.config import plain
from torchsbp.train.data import images
from torchsbp.train.data.images import Arrays

from .models import tiny_convnext, tiny_vit

SECONDS, CASES = 4, 400  # of each test, on its own CPU: whatever ends first
NAN, INF = float("nan"), float("inf")

ANY: list[Any] = [
    None, True, False, 0, 1, -1, 2, 10**30, 0.0, 0.5, 1.0, -0.5, 1.5, NAN, INF, 1e-9, "", "x", "grid", b"x", [], {},
    (), [0.5], (0.5, 1.0), [0.5] * 3, [None], {"a": 1}, {0}, object(), print, len, nn.Linear, nn.Identity(), lambda: 0,
    lambda *of: None, torch.tensor(0.5), torch.arange(3), torch.bfloat16, 1j, range(2), Ellipsis, SBPConfig(),
]  # fmt: skip
GOOD: dict[str, list[Any]] = {
    "keep_ratio": [0.5, 1, 0.25, (0.25, 0.75), [0.5, 0.5], 1e-6, schedules.ramp(0.5, steps=8)],
    "sampler": ["grid", "random", "stratified", "norm", "checkerboard", "frames", "frames_jitter"],
    "attention": ["query", "qkv", "head", "exact"],
    "blocks": [None, 0.5, 1.0, [0], [-1], ["blocks.*"], ["stages.*"], lambda name, block: True],
    "scope": ["branch", "block"],
    "per_sample": [True, False, "balanced"],
    "per_block": [True, False],
    "exact_downsampling": [True, False],
    "scale": ["none", "weight", "rows"],
    "recompute": [True, False, 0.5],
    "seed": [0, -3, 2**70],
}
MODELS: list[Callable[[], nn.Module]] = [lambda: tiny_vit(img_size=32), tiny_convnext]
IMAGES = [(2, 3, 32, 32), (1, 3, 32, 32), (0, 3, 32, 32)]
SHAPES: list[Any] = [*IMAGES, (2, 3, 33, 35), (2, 1, 32, 32), (2,), 64, "2,3", None]


def drawn(rng: random.Random) -> dict[str, Any]:
    """Some options: most of them good, some anything, now and then one that there is not."""
    names = rng.sample(list(GOOD), rng.randint(0, 4))
    options = {name: rng.choice(GOOD[name] if rng.random() < 0.75 else ANY) for name in names}
    return options | (
        {rng.choice(["ratio", "config", "model_", "keep"]): rng.choice(ANY)} if rng.random() < 0.1 else {}
    )


def told(call: Callable[[], Any], what: object) -> Any:
    """What a call gives, None if it is refused by us; anything else is a mistake of ours."""
    try:
        return call()
    except UsageError:
        return None
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} for {what}: {error}") from error


def fingerprint(model: nn.Module) -> list[Any]:
    """Classes, attributes and every number of a model."""
    modules = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    return [*modules, *((name, t.data_ptr(), t._version) for name, t in model.state_dict().items())]


def cases(seed: int, seconds: float = SECONDS):
    end = time.process_time() + seconds
    for number in range(CASES):
        if time.process_time() > end:
            return
        yield random.Random(1000 * seed + number)


@pytest.mark.parametrize("build", MODELS, ids=["vit", "convnext"])
def test_apply_and_a_step_succeed_or_are_refused(build):
    model, ends = build(), {"refused by apply": 0, "refused in training": 0, "trained": 0}
    before = fingerprint(model)
    for rng in cases(0):
        options, shape = drawn(rng), rng.choice(IMAGES)
        patched = told(lambda options=options: torchsbp.apply(model, **options), options)
        if patched is None:
            ends["refused by apply"] += 1
        else:
            torchsbp.set_step(model, 3)
            trained = told(lambda shape=shape: step(model, shape), (options, shape))
            ends["refused in training" if trained is None else "trained"] += 1
            torchsbp.remove(model)
        assert fingerprint(model) == before, options
    assert min(ends.values()) >= 3, ends


def step(model: nn.Module, shape: tuple[int, ...]) -> bool:
    """A step, all of whose gradients are numbers."""
    model(torch.ones(shape)).sum().backward()
    found = [p.grad.isfinite().all() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    assert all(found)
    return True


def test_estimate_and_plan_succeed_or_are_refused():
    model, ends = tiny_vit(img_size=32), {True: 0, False: 0}
    before = fingerprint(model)
    memories = [*ANY, "1GiB", "8G", "8", "1MiB", 2**30]
    for rng in cases(1):
        shape = rng.choice(SHAPES if rng.random() < 0.7 else ANY)
        options = {name: value for name, value in drawn(rng).items() if name in GOOD}
        config = told(lambda options=options: SBPConfig(**options), options)
        config = rng.choice([None, "full", "checkpoint", config, rng.choice(ANY)])
        given = {name: rng.choice(ANY) for name in ("precision", "optimizer", "device", "loss") if rng.random() < 0.1}
        if rng.random() < 0.6:
            what = shape, config, given
            found = told(lambda: torchsbp.estimate(model, shape, config, **given), what)  # noqa: B023
        else:
            memory = rng.choice(memories)
            given.pop("device", None)
            given |= {"configs": rng.choice([[config], [], config])} if rng.random() < 0.8 else {}
            what = shape, memory, given
            found = told(lambda: torchsbp.plan(model, shape, memory, **given), what)  # noqa: B023
        ends[found is not None] += 1
        assert fingerprint(model) == before, what
    assert min(ends.values()) >= 3, ends


TINY_RUN = {
    "task": {"data": {"source": "digits", "size": 8, "channels": 1, "mean": [0.3], "std": [0.35], "workers": 0}},
    "epochs": 1, "batch": 16, "micro_batch": 8, "precision": "float32", "device": "cpu", "log": {"progress": False},
    "schedule": {"warmup_epochs": 0},
}  # fmt: skip
TINY_RUN["task"]["model"] = {
    "options": {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
}  # of one update
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 3.5, 0.5, 1e-3, -0.5, 1e30, 10**30, ".nan", ".inf", "", "x", "auto", "cpu", [],
    {}, [0.5], [1, 0], {"a": 1}, "1e-3", "null", "~", "[", "{a: 1", "\u0000", "é", " ", "../x", "0x10", "2026-11-16",
]  # fmt: skip
FITTING: dict[str, list[Any]] = {
    "sbp.preset": ["none", "exact", "default", "fast", "paper"],
    "sbp.keep_ratio": [0.5, 0.25, [0.5, 1.0]],
    "sbp.sampler": ["grid", "random"],
    "sbp.attention": ["query", "qkv", "head"],
    "sbp.schedule": [[[0, 0.5]], [[0, 1.0], [0.5, 0.5]]],
    "optimizer.name": ["sgd", "adamw", "lion", "momentum"],
    "optimizer.options": [{"momentum": 0.9}, {"betas": [0.9, 0.99]}],
    "optimizer.layer_decay": [0.9],
    "optimizer.clip_norm": [1.0],
    "schedule.name": ["cosine", "step", "poly"],
    "schedule.options": [{"decay_epochs": 1}],
    "ema.decay": [0.9],
    "precision": ["bfloat16"],
    "micro_batch": [16, 4, None],
    "checkpoint.every_steps": [1],
    "task.model.name": ["vit_tiny_patch16_224", "deit_tiny_patch16_224"],
    "task.model.drop_path": [0.2],
    "task.model.init": [{"pos_embed": 1.0}],
    "task.data.classes": [10],
    "task.augment.auto_augment": ["rand-m5-inc1"],
    "task.augment.mixup": [0.8],
    "task.augment.crop": ["pad", "none"],
    "task.augment.erase": [0.25],
}


def settings(config: dict[str, Any], name: str = "") -> list[str]:
    """The dotted names of all settings."""
    return [
        path
        for key, value in config.items()
        for path in (settings(value, f"{name}{key}.") if isinstance(value, dict) and value else [f"{name}{key}"])
    ]


LEFT_OUT = (
    "out",
    "device",
    "compile",
    "epochs",
    "throughput",
    "log.wandb",
    "task.model.pretrained",
    "task.data.workers",
)


def options_of_a_run(rng: random.Random, names: list[str]) -> list[str]:
    """Some that fit, most often one that is anything, now and then one that there is not."""
    chosen = rng.sample([*FITTING.items()], rng.randint(0, 3))
    options = [f"--{name}={rng.choice(values)}" for name, values in chosen]
    if rng.random() < 0.7:
        options.append(f"--{rng.choice(names)}={rng.choice(VALUES)}")
    if rng.random() < 0.1:
        options.append(f"--{rng.choice(['epoch', 'task.x', 'sbp', 'task', 'data.size'])}={rng.choice(VALUES)}")
    return options


def few(train: bool, mode: str) -> Arrays:
    return Arrays("digits", np.zeros((16, 8, 8), np.uint8), [*range(10), *range(6)], 10, mode)


def test_a_run_of_one_update_succeeds_or_is_refused(tmp_path, capfd, monkeypatch):
    """An exit code of ours, with a message; no traceback, and nothing beside the run's folder."""
    monkeypatch.setattr(images, "digits", few)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(TINY_RUN))
    parsed = parse("train", [str(recipe)])
    names = [name for name in settings(plain(asdict(parsed))) if name not in LEFT_OUT]
    ends: Counter[int] = Counter()
    for rng in cases(2, seconds=10):
        options, out = options_of_a_run(rng, names), tmp_path / "run"
        code = exit_code(["train", str(recipe), f"--out={out}", *options])
        told = capfd.readouterr().err
        assert code in (0, 1, 2), (options, told)
        assert "Traceback" not in told, (options, told)
        assert (out / "model.safetensors").exists() == (code == 0), (options, told)
        assert code == 0 or told.strip(), options
        ends[code] += 1
        shutil.rmtree(out, ignore_errors=True)
        assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"], options
    assert min(ends[0], ends[2]) >= 3, ends


def exit_code(argv: list[str]) -> object:
    try:
        return main(argv)
    except SystemExit as end:  # of the parser
        return end.code
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} for {argv}: {error}") from error


def test_functions_take_anything_or_refuse_it():
    model = torchsbp.apply(tiny_vit(img_size=32))
    x, keep = torch.zeros(2, 6, 4), torch.tensor([0, 2])
    calls: list[Callable[[Any], Any]] = [
        torchsbp.apply, torchsbp.kept,
        lambda any_: torchsbp.apply(tiny_vit(), any_),
        lambda any_: torchsbp.apply(tiny_vit(), config=any_),
        lambda any_: torchsbp.set_step(model, any_),
        lambda any_: torchsbp.check(any_),
        lambda any_: torchsbp.sbp(nn.Identity(), x, any_),
        lambda any_: torchsbp.sbp(nn.Identity(), x, keep, any_),
        lambda any_: torchsbp.sbp(nn.Identity(), any_, keep),
        lambda any_: torchsbp.sbp_frames(nn.Identity(), x, any_, step=0),
        lambda any_: torchsbp.sbp_frames(nn.Identity(), x, step=any_),
        lambda any_: torchsbp.sbp_frames(nn.Identity(), x, step=0, sampler=any_),
        lambda any_: torchsbp.sbp_frames(nn.Identity(), any_, step=0),
        lambda any_: torchsbp.measure(any_, lambda: None),
        lambda any_: torchsbp.register(any_),
        lambda any_: torchsbp.schedules.Milestones(any_),
        lambda any_: torchsbp.schedules.ramp(any_, steps=4),
        lambda any_: torchsbp.schedules.ramp(0.5, steps=any_),
        lambda any_: SBPConfig.preset(any_),
    ]  # fmt: skip
    for number, call in enumerate(calls):
        for value in ANY:
            told(lambda call=call, value=value: call(value), (number, value))
    assert any(isinstance(module, Site) for module in model.modules())

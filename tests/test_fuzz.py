"""Generated configurations and arguments: success or an error of ours, and never a changed model. Bounded in time."""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchsbp
from torchsbp import SBPConfig, schedules
from torchsbp.errors import UsageError
from torchsbp.patching.site import Site

from .models import tiny_convnext, tiny_vit

SECONDS, CASES = 4, 400  # of each test: whatever ends first
NAN, INF = float("nan"), float("inf")

ANY: list[Any] = [
    None, True, False, 0, 1, -1, 2, 10**30, 0.0, 0.5, 1.0, -0.5, 1.5, NAN, INF, 1e-9, "", "x", "grid", b"x", [], {},
    (), [0.5], (0.5, 1.0), [0.5] * 3, [None], {"a": 1}, {0}, object(), print, len, nn.Linear, nn.Identity(), lambda: 0,
    lambda *of: None, torch.tensor(0.5), torch.arange(3), torch.bfloat16, 1j, range(2), Ellipsis, SBPConfig(),
]  # fmt: skip
GOOD: dict[str, list[Any]] = {
    "keep_ratio": [0.5, 1, 0.25, (0.25, 0.75), [0.5, 0.5], 1e-6, schedules.ramp(0.5, steps=8)],
    "sampler": ["grid", "random", "checkerboard", "frames", "frames_jitter"],
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


def cases(seed: int):
    end = time.perf_counter() + SECONDS
    for number in range(CASES):
        if time.perf_counter() > end:
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

"""Every number in a configuration has a range: its bounds are allowed, what is beyond is refused when it is read."""

import math
import re
from collections.abc import Iterator
from copy import copy
from dataclasses import Field, fields, is_dataclass
from typing import Any, get_args, get_type_hints

import pytest

from torchsbp.cli.recipe import parse
from torchsbp.errors import UsageError
from torchsbp.train import tasks
from torchsbp.train.config import SBP, Config
from torchsbp.train.optimizer import check_options
from torchsbp.train.ranges import KEY, Range, check
from torchsbp.train.tasks.classification import ClassificationOptions, Data

from .runs import train

DEFAULTS = Config(ClassificationOptions())
BEYOND = 1e-9

ABSURD = [  # as the issue found them, and where they lead
    ("optimizer.clip_norm=-1", "optimizer.clip_norm=-1.0 is not allowed; allowed: a number more than 0, or null"),
    ("optimizer.clip_norm=0", "optimizer.clip_norm=0.0 is not allowed; allowed: a number more than 0, or null"),
    ("schedule.min_lr=1", "schedule.min_lr=1.0 is not allowed; allowed: a number in [0, optimizer.lr=0.001]"),
    ("schedule.warmup_lr=1", "schedule.warmup_lr=1.0 is not allowed; allowed: a number in [0, optimizer.lr=0.001]"),
    ("schedule.warmup_lr=-1", "schedule.warmup_lr=-1.0 is not allowed; allowed: a number at least 0"),
    ("ema.decay=2", "ema.decay=2.0 is not allowed; allowed: a number in [0, 1), or null"),
    ("optimizer.weight_decay=-1", "optimizer.weight_decay=-1.0 is not allowed; allowed: a number at least 0"),
    ("optimizer.lr=-1", "optimizer.lr=-1.0 is not allowed; allowed: a number at least 0"),
    ("optimizer.lr=.inf", "optimizer.lr=inf is not allowed; allowed: a number at least 0"),
    ("optimizer.lr=.nan", "optimizer.lr=nan is not allowed; allowed: a number at least 0"),
    ("optimizer.layer_decay=0", "optimizer.layer_decay=0.0 is not allowed; allowed: a number in (0, 1], or null"),
    ("task.augment.mixup=-1", "task.augment.mixup=-1.0 is not allowed; allowed: a number at least 0"),
    ("task.augment.cutmix=-1", "task.augment.cutmix=-1.0 is not allowed; allowed: a number at least 0"),
    ("task.augment.erase=5", "task.augment.erase=5.0 is not allowed; allowed: a number in [0, 1]"),
    ("task.augment.hflip=7", "task.augment.hflip=7.0 is not allowed; allowed: a number in [0, 1]"),
    ("task.augment.smoothing=3", "task.augment.smoothing=3.0 is not allowed; allowed: a number in [0, 1)"),
    ("task.augment.scale=[2,1]", "task.augment.scale=[2.0, 1.0] is not allowed; allowed: two numbers in (0, 1], the f"),
    ("task.augment.scale=[1,2]", "task.augment.scale=(1.0, 2.0) is not allowed; allowed: numbers in (0, 1]"),
    ("task.data.crop_pct=0", "task.data.crop_pct=0.0 is not allowed; allowed: a number in (0, 1]"),
    ("task.data.std=[0]", "task.data.std=[0.0] is not allowed; allowed: numbers in (0, 1]"),
    ("task.data.mean=[123]", "task.data.mean=[123.0] is not allowed; allowed: numbers in [0, 1]"),
    ("task.data.size=0", "task.data.size=0 is not allowed; allowed: an integer at least 1"),
    ("task.data.workers=-1", "task.data.workers=-1 is not allowed; allowed: an integer in [0, 1024]"),
    ("task.model.drop_path=3", "task.model.drop_path=3.0 is not allowed; allowed: a number in [0, 1)"),
    ("batch=0", "batch=0 is not allowed; allowed: an integer at least 1"),
    ("micro_batch=0", "micro_batch=0 is not allowed; allowed: an integer at least 1, or null"),
    ("checkpoint.keep=0", "checkpoint.keep=0 is not allowed; allowed: an integer at least 1"),
    ("seed=-1", "seed=-1 is not allowed; allowed: an integer in [0, 9.22337e+18)"),
]


@pytest.mark.parametrize("option, message", ABSURD, ids=[option for option, _ in ABSURD])
def test_absurd_values_are_refused_in_one_form(option, message, tmp_path, capsys):
    out = tmp_path / "run"
    assert train(["digits", f"--out={out}", "--optimizer.lr=0.001", f"--{option}"]) == 2
    assert f"torchsbp train: {message}" in capsys.readouterr().err
    assert not out.exists()


OF_TASKS = [  # lists without a number, numbers in the wrong order, and those that others are divided by
    ("shapes", "augment.short=[]", "=[] is not allowed; allowed: numbers at least 1"),
    ("shapes", "augment.crop_short=[]", "=[] is not allowed; allowed: numbers at least 1"),
    ("shapes", "augment.crop_sides=[64,48]", "=[64, 48] is not allowed; allowed: two integers, the first not above"),
    ("coco/mask_rcnn_convnext_tiny", "data.multiple=0", "=0 is not allowed; allowed: an integer at least 1"),
    ("online", "temporal.heads=0", "=0 is not allowed; allowed: an integer at least 1"),
    ("online", "temporal.heads=-1", "=-1 is not allowed; allowed: an integer at least 1"),
]


@pytest.mark.parametrize("recipe, option, message", OF_TASKS, ids=[f"{name} {option}" for name, option, _ in OF_TASKS])
def test_absurd_values_of_tasks_are_refused_when_they_are_read(recipe, option, message):
    with pytest.raises(UsageError, match=re.escape(f"task.{option.partition('=')[0]}{message}")):
        parse("train", [recipe, f"--task.{option}"])


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"decay_milestones": [3]},
            "schedule.options.decay_milestones=[3] is not allowed; allowed: with schedule.name mul",
        ),
        (
            {"decay_rate": 0.5},
            "schedule.options.decay_rate=0.5 is not allowed; allowed: with schedule.name step or multi",
        ),
        (
            {"name": "multistep", "decay_milestones": [3, 1]},
            "=[3, 1] is not allowed; allowed: a list of epochs, in asc",
        ),
        ({"name": "multistep", "decay_milestones": ["x", 1]}, "=['x', 1] is not allowed; allowed: a list of epochs"),
    ],
)
def test_options_that_the_schedule_would_ignore_are_refused(options, message):
    name = options.pop("name", "cosine")
    with pytest.raises(UsageError, match=re.escape(message)):
        check_options(parse("train", ["digits", f"--schedule.name={name}", f"--schedule.options={options}"]).schedule)


@pytest.mark.parametrize(
    "option, message",
    [
        ("keep_ratio=0", "keep_ratio must be a number in (0, 1], found 0"),
        ("recompute=2", "recompute=2.0 is not allowed; allowed: True, False, a number in [0, 1]"),
        (
            "schedule=[[0, 1.0], [2.5, 3.0]]",
            "sbp.schedule at epoch 2.5: keep_ratio must be a number in (0, 1]",
        ),
        ("schedule=[]", "the steps of points must start at 0 and increase strictly, found []"),
    ],
)
def test_the_numbers_of_sbp_are_checked_when_they_are_read(option, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        parse("train", ["digits", "--sbp.preset=default", f"--sbp.{option}"])


def test_a_schedule_may_change_within_an_epoch():
    config = parse("train", ["digits", "--sbp.preset=default", "--sbp.schedule=[[0, 0.5], [0.1, 0.25]]"])
    assert config.sbp.build(0, 10).keep_ratio.points == ((0, 0.5), (1, 0.25))


def parts(options: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """This dataclass and those within, by name."""
    yield name, options
    for its in fields(options):
        value = getattr(options, its.name)
        if is_dataclass(value):
            yield from parts(value, f"{name}.{its.name}".strip("."))


def has_numbers(hint: Any) -> bool:
    return hint in (int, float) or any(has_numbers(part) for part in get_args(hint) if isinstance(part, type) or part)


CHECKED = [  # SBP's numbers are checked by SBPConfig
    (name, options, its) for name, options in parts(DEFAULTS) if not isinstance(options, SBP) for its in fields(options)
]
RANGED = [(f"{name}.{its.name}".strip("."), o, its) for name, o, its in CHECKED if KEY in its.metadata]


def test_every_number_has_a_range():
    lacking = [
        f"{name}.{its.name}"
        for name, options, its in CHECKED
        if has_numbers(get_type_hints(type(options))[its.name]) and KEY not in its.metadata
        and its.name != "channels"  # a choice of two
    ]  # fmt: skip
    assert lacking == []
    assert len(RANGED) == 39


def with_value(options: Any, its: Field, value: Any) -> Any:
    """The same options, where one is this number, or has it in each of its places."""
    now, changed = getattr(options, its.name), copy(options)
    shaped = [value] * len(now) if isinstance(now, list | tuple) else {"a": value} if isinstance(now, dict) else value
    setattr(changed, its.name, shaped)
    return changed


def bounds(allowed: Range, whole: bool) -> tuple[list[float], list[float]]:
    """Numbers at the bounds, and the nearest beyond them."""
    least = 1 if whole else BEYOND
    inside = [allowed.low + least if allowed.open_low else allowed.low]
    outside = [allowed.low if allowed.open_low else allowed.low - least]
    if math.isfinite(allowed.high):
        inside.append(allowed.high - least if allowed.open_high else allowed.high)
        outside.append(allowed.high if allowed.open_high else allowed.high + least)
    return inside, [*outside, math.nan, math.inf, -math.inf, *([1.5] if whole else []), True, "1"]


@pytest.mark.parametrize("name, options, its", RANGED, ids=[name for name, *_ in RANGED])
def test_bounds_are_allowed_and_what_is_beyond_is_not(name, options, its):
    allowed = its.metadata[KEY]
    inside, outside = bounds(allowed, whole="float" not in str(its.type))
    for value in inside:
        check(with_value(options, its, value), "x")
    for value in outside:
        with pytest.raises(UsageError, match=rf"^x\.{its.name}=.* is not allowed; allowed: "):
            check(with_value(options, its, value), "x")
    if its.default is None:
        check(with_value(options, its, None), "x")
    else:
        with pytest.raises(UsageError, match="is not allowed"):
            check(with_value(options, its, None), "x")


def test_a_task_that_is_made_in_python_is_checked_too():
    with pytest.raises(UsageError, match=r"task\.data\.crop_pct=0 is not allowed"):
        tasks.start(ClassificationOptions(data=Data(source="digits", crop_pct=0)), seed=0)

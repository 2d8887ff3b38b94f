"""Trained weights as ``eval``, ``predict``, ``detect`` and ``export`` take them: a run, and options that change it."""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .recipe import parse

if TYPE_CHECKING:
    from torch import nn

    from ..train.config import Config
    from ..train.distributed import Processes
    from ..train.runs.stored import Stored
    from ..train.task import Task


class Opened(NamedTuple):
    """A model in eval mode on its device, and what belongs to it."""

    stored: "Stored"
    config: "Config"
    processes: "Processes"
    task: "Task"
    model: "nn.Module"


def parser(command: str, description: str) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog=f"torchsbp {command}",
        description=f"{description} Any option of torchsbp train changes the configuration that the run was trained "
        "with, such as --task.data.root or --device.",
        allow_abbrev=False,
    )
    result.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="a run's folder (its best checkpoint), a checkpoint, or its safetensors",
    )
    result.add_argument("--weights", choices=("ema", "model"), help="default: ema if the run has it")
    return result


@contextmanager
def opened(own: argparse.Namespace, command: str, overrides: list[str]) -> Iterator[Opened]:
    from ..train.distributed import processes
    from ..train.raw import told
    from ..train.runs.stored import read_stored
    from ..train.trained import trained

    stored = read_stored(own.run, own.weights)
    config = parse(command, ["--config", json.dumps(without_training(stored.config)), *overrides])
    with processes(config.device) as here, told(config, here):
        yield Opened(stored, config, here, *trained(stored, config, here))


def without_training(config: dict[str, Any]) -> dict[str, Any]:
    """The run's configuration without SBP, a detector's ``lean``, ``resume`` and ``throughput``, which only training
    needs. An earlier version had other options of SBP and ``lean``, which would be refused."""
    task = config.get("task", {})
    if task.get("name") == "detection":
        task = {**task, "lean": {}}
    return {**config, "task": task, "sbp": {"preset": "none"}, "resume": None, "throughput": None}

"""Trained weights and what is stored with them: enough to evaluate, predict and export."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ...errors import CheckpointError
from . import checkpoint, checks
from .weights import file_of, read_weights, tensors


class Stored(NamedTuple):
    """The weights of a run."""

    path: Path
    name: str
    """model, or ema for averaged weights"""
    step: int
    config: dict[str, Any]
    """the run's configuration"""
    about: Mapping[str, str]
    """what the task's ``weights_about`` said of the weights"""
    weights: dict[str, Tensor]

    def metadata(self) -> dict[str, str]:
        """The metadata that a file of these weights needs so that ``read_stored`` can read it."""
        return {"step": str(self.step), "config": json.dumps(self.config), "weights": self.name, **self.about}


def read_stored(path: Path, wanted: str | None) -> Stored:
    """Read the weights of a run's folder (its best checkpoint), a checkpoint, or safetensors. ``wanted`` is model or
    ema; None takes the average if there is one."""
    path = file_of(path)
    return of_safetensors(path, wanted) if path.suffix == ".safetensors" else of_checkpoint(path, wanted)


def of_checkpoint(path: Path, wanted: str | None) -> Stored:
    content = checkpoint.read_run(path)
    name = wanted or ("model" if content["ema"] is None else "ema")
    if content[name] is None:
        raise CheckpointError(f"{path} has no average of weights: use --weights model")
    return Stored(
        path,
        name,
        content["progress"]["step"],
        content["config"],
        content.get("about", {}),  # older checkpoints have none
        tensors(content[name], path),
    )


def of_safetensors(path: Path, wanted: str | None) -> Stored:
    from safetensors import safe_open

    weights = read_weights(path)
    with safe_open(path, "pt") as file:
        about = file.metadata() or {}
    try:
        config, step = json.loads(about.pop("config")), int(about.pop("step"))
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} does not say how its weights were trained: use those that this version of torchsbp writes (train, "
            "export), or a checkpoint"
        ) from error
    name = about.pop("weights", "model")
    if wanted not in (None, name):
        raise CheckpointError(f"{path} has the weights called {name}, not {wanted}: use a run's folder or a checkpoint")
    stored = {key: value for key, value in about.items() if key not in (checks.SUM, *checks.SUMMED)}
    return Stored(path, name, step, config, stored, weights)

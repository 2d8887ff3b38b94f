"""The commands ``torchsbp train`` and ``torchsbp eval``.

Exit codes: 0 finished; 1 the run can't go on; 2 wrong usage or configuration; 75 a signal came, everything is saved:
run the same command again with ``--resume auto``.
"""

import argparse
import json
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, set_parsing_settings

from . import checkpoint
from .config import Config
from .errors import DataError, RunError, SignalError
from .state import model_state
from .weights import export

INTERRUPTED = 75  # EX_TEMPFAIL: try again
RECIPES = Path(str(files("torchsbp") / "recipes"))


def recipes() -> list[str]:
    return sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml"))


def find_recipe(name: str) -> Path:
    """A shipped recipe by name, or any file."""
    for path in (Path(name), RECIPES / f"{name}.yaml"):
        if path.is_file():
            return path
    raise ValueError(f"no recipe {name!r}: neither a file nor one of {', '.join(recipes())}")


def parser(command: str) -> ArgumentParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    result = ArgumentParser(
        prog=f"torchsbp {command}",
        description=f"torchsbp {command} RECIPE [options]. Recipes: {', '.join(recipes())}, or a YAML file.",
    )
    result.add_argument("--config", action="config", help="a further YAML file, over the recipe")
    result.add_class_arguments(Config)
    return result


def parse(command: str, argv: list[str]) -> Config:
    if argv and not argv[0].startswith("-"):
        argv = ["--config", str(find_recipe(argv[0])), *argv[1:]]
    options = parser(command).parse_args(argv)
    options.pop("config")
    return Config(**vars(parser(command).instantiate(options)))


def guarded(run: Callable[[], None]) -> int:
    """Run, and turn what can go wrong into a message and an exit code."""
    try:
        run()
    except SignalError:
        print("interrupted: everything is saved; continue with --resume auto", file=sys.stderr)
        return INTERRUPTED
    except DataError as error:  # from a worker it comes with the worker's traceback before it
        return fail(str(error).rstrip().splitlines()[-1].split("DataError: ")[-1], 1)
    except (RunError, OSError) as error:
        return fail(str(error), 1)
    except (ValueError, TypeError) as error:
        return fail(str(error), 2)
    return 0


def fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


def train(argv: list[str]) -> int:
    if not argv:
        argv = ["--help"]

    def run() -> None:
        from .distributed import processes
        from .loop import Trainer
        from .throughput import report

        config = parse("train", argv)
        with processes(config.device) as here:
            trainer = Trainer(config, here)
            if config.throughput is not None:
                report(trainer, config.throughput)
            else:
                trainer.fit()

    return guarded(run)


def without_start(config: dict[str, Any]) -> dict[str, Any]:
    """What evaluation needs: no weights to begin from, no SBP."""
    task = {**config["task"], "model": {**config["task"]["model"], "weights": None, "pretrained": False}}
    return {**config, "task": task, "sbp": {"preset": "none"}, "resume": None, "throughput": None}


def evaluate(argv: list[str]) -> int:
    """``torchsbp eval RUN|CHECKPOINT [options]``: metrics of a trained model on its validation data."""
    command = argparse.ArgumentParser(
        prog="torchsbp eval",
        description="Evaluate a checkpoint with the configuration it was trained with; any option of torchsbp train "
        "changes that, such as --task.data.root or --device.",
    )
    command.add_argument("checkpoint", type=Path, help="a run's folder (its best checkpoint) or a checkpoint file")
    command.add_argument("--weights", choices=("ema", "model"), help="default: ema if the run has it")
    command.add_argument("--export", type=Path, metavar="FILE", help="write these weights as safetensors for timm")
    own, overrides = command.parse_known_args(argv)

    def run() -> None:
        from .distributed import processes
        from .loop import Trainer

        path = own.checkpoint / "checkpoints" / checkpoint.BEST if own.checkpoint.is_dir() else own.checkpoint
        content = checkpoint.read_run(path)
        config = parse("eval", ["--config", json.dumps(without_start(content["config"])), *overrides])
        with processes(config.device) as here:
            trainer = Trainer(config, here)
            weights = own.weights or ("ema" if content["ema"] is not None else "model")
            step = content["progress"]["step"]
            trainer.load_for_test(content, weights, path)
            values = trainer.test(trainer.model)
            exported = model_state(trainer.model)
            if here.main:
                if own.export is not None:
                    export(exported, own.export, {"step": step, "config": content["config"]})
                print(json.dumps({"checkpoint": str(path), "weights": weights, "step": step, **values}))

    return guarded(run)

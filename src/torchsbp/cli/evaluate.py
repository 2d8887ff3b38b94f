"""``torchsbp eval RUN|CHECKPOINT [options]``: metrics of a trained model on its validation data."""

import argparse
import json
from pathlib import Path
from typing import Any

from .recipe import parse

NAME = "eval"
PURPOSE = "evaluate a run or weights"


def arguments() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="torchsbp eval",
        description="Evaluate a checkpoint with the configuration it was trained with; any option of torchsbp train "
        "changes that, such as --task.data.root or --device.",
    )
    result.add_argument("checkpoint", type=Path, help="a run's folder (its best checkpoint) or a checkpoint file")
    result.add_argument("--weights", choices=("ema", "model"), help="default: ema if the run has it")
    result.add_argument("--export", type=Path, metavar="FILE", help="write these weights as safetensors for timm")
    return result


def run(argv: list[str]) -> None:
    own, overrides = arguments().parse_known_args(argv)
    from ..train.distributed import processes
    from ..train.loop import Trainer
    from ..train.raw import told
    from ..train.runs import checkpoint
    from ..train.runs.state import model_state
    from ..train.runs.weights import export

    path = own.checkpoint / "checkpoints" / checkpoint.BEST if own.checkpoint.is_dir() else own.checkpoint
    content = checkpoint.read_run(path)
    config = parse("eval", ["--config", json.dumps(for_evaluation(content["config"])), *overrides])
    with processes(config.device) as here, told(config, here):
        trainer = Trainer(config, here, start=False)
        weights = own.weights or ("ema" if content["ema"] is not None else "model")
        step = content["progress"]["step"]
        trainer.learner.load_weights(content, weights, path)
        _, values = trainer.test(trainer.model)
        exported = model_state(trainer.model)
        if here.main:
            if own.export is not None:
                about = {"step": step, "config": content["config"], **trainer.task.weights_about()}
                export(exported, own.export, about)
            print(json.dumps({"checkpoint": str(path), "weights": weights, "step": step, **values}))


def for_evaluation(config: dict[str, Any]) -> dict[str, Any]:
    """As the run was configured, but without SBP."""
    return {**config, "sbp": {"preset": "none"}, "resume": None, "throughput": None}

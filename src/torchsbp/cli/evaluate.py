"""``torchsbp eval RUN [options]``: metrics of a trained model on its validation data."""

import json

from .trained import opened, parser

NAME = "eval"
PURPOSE = "evaluate a run or weights"


def run(argv: list[str]) -> None:
    arguments = parser("eval", "Evaluate trained weights on their validation data; training data are not needed.")
    own, overrides = arguments.parse_known_args(argv)
    with opened(own, "eval", overrides) as its:
        from ..train.evaluation import evaluated

        _, values = evaluated(its.task, its.model, its.config, its.processes)
        if its.processes.main:
            stored = its.stored
            print(json.dumps({"checkpoint": str(stored.path), "weights": stored.name, "step": stored.step, **values}))

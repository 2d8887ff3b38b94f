"""``torchsbp eval RUN [options]``: metrics of a trained model on its validation data."""

import json
import sys

from .trained import opened, parser

NAME = "eval"
PURPOSE = "evaluate a run or weights"


def run(argv: list[str]) -> None:
    arguments = parser("eval", "Evaluate trained weights on their validation data; training data are not needed.")
    own, overrides = arguments.parse_known_args(argv)
    with opened(own, "eval", overrides) as its:
        from ..train.data.broken import Broken
        from ..train.evaluation import evaluated

        def say(message: str) -> None:
            if its.processes.main:
                print(message, file=sys.stderr)

        stored, broken = its.stored, Broken(its.task.broken, say)
        _, values = evaluated(its.task, its.model, its.config, its.processes, broken)
        broken.gather()
        if its.processes.main:
            about = {"checkpoint": str(stored.path), "weights": stored.name, "step": stored.step}
            print(json.dumps({**about, **values, **({"broken": broken.listed()} if broken.found else {})}))

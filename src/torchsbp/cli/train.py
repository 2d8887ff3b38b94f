"""``torchsbp train RECIPE [options]``."""

from .recipe import parse

PURPOSE = "train from a recipe"


def run(argv: list[str]) -> None:
    config = parse("train", argv or ["--help"])
    from ..train.distributed import processes
    from ..train.loop import Trainer
    from ..train.raw import told
    from ..train.throughput import report

    with processes(config.device) as here, told(config, here):
        trainer = Trainer(config, here)
        if config.throughput is not None:
            report(trainer, config.throughput)
        else:
            trainer.fit()

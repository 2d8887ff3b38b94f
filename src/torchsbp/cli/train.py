"""``torchsbp train RECIPE [options]``."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import RunError
from .recipe import parse

PURPOSE = "train from a recipe"


def run(argv: list[str]) -> None:
    with starting():
        config = parse("train", argv or ["--help"])
        from ..train.distributed import processes
        from ..train.loop import Trainer
        from ..train.raw import told
        from ..train.throughput import report

    with processes(config.device) as here, told(config, here):
        with starting():
            trainer = Trainer(config, here)
        if config.throughput is not None:
            report(trainer, config.throughput)
        else:
            trainer.fit()


@contextmanager
def starting() -> Iterator[None]:
    """Ctrl-C before there is anything to save; later it is the loop's."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise RunError("interrupted while starting: nothing was trained, nothing written") from error

"""A command in this process, on a small model."""

import timm
from torch import nn

from torchsbp.cli.main import main

SMALL = ("test_vit", "--batch", "4")
SHALLOW = ("tests.cli.commands:shallow", "--shape", "3,160,160", "--batch", "4")


def shallow() -> nn.Module:
    """For what is estimated many times."""
    return timm.create_model("test_vit", depth=2)


def run(capsys, *argv: str) -> tuple[int, str, str]:
    """Exit status, what was printed, what was told on stderr."""
    status = main(argv)
    return status, *capsys.readouterr()

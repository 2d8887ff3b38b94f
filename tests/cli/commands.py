"""A command in this process, on a small model."""

from torchsbp.cli.main import main

SMALL = ("test_vit", "--batch", "4")


def run(capsys, *argv: str) -> tuple[int, str, str]:
    """Exit status, what was printed, what was told on stderr."""
    status = main(argv)
    return status, *capsys.readouterr()

"""``torchsbp recipe NAME > my.yaml``: print a recipe as it is, to be changed."""

import argparse

from .recipe import find_recipe

NAME = "recipe"
PURPOSE = "print a recipe, to change it"


def run(argv: list[str]) -> None:
    """Print a shipped recipe: torchsbp recipe cifar10 > my.yaml, then torchsbp train my.yaml."""
    parser = argparse.ArgumentParser("torchsbp recipe", description=run.__doc__)
    parser.add_argument("name", metavar="NAME", help="torchsbp recipes lists them")
    print(find_recipe(parser.parse_args(argv).name).read_text(encoding="utf-8"), end="")

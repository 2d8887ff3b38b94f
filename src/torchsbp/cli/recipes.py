"""``torchsbp recipes``: list the shipped recipes, a line each."""

import argparse

from .recipe import find_recipe, recipes

PURPOSE = "the recipes that train knows"


def run(argv: list[str]) -> None:
    """List the recipes that torchsbp train knows by name."""
    argparse.ArgumentParser("torchsbp recipes", description=run.__doc__).parse_args(argv)
    names = recipes()
    width = max(len(name) for name in names)
    for name in names:
        print(f"{name:<{width}}  {title(name)}")
    print("\ntorchsbp recipe NAME prints one: torchsbp recipe NAME > my.yaml, then torchsbp train my.yaml")


def title(name: str) -> str:
    """The recipe's first line, a comment that says what it is."""
    with find_recipe(name).open(encoding="utf-8") as lines:
        return next(lines, "").lstrip("#").strip()

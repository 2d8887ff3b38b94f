"""What a keep-ratio that is a name means, family by family: docs/study has the evidence."""

from collections.abc import Mapping
from typing import Any, NamedTuple

Options = Mapping[str, Any]
"""Of ``SBPConfig``: a keep-ratio, and more, which counts where the user has left it as it is by default."""


class Recommended(NamedTuple):
    """What a family of models is trained with: where nothing is chosen, and where a step shall be shorter."""

    default: Options
    fast: Options


NAMES = Recommended._fields
EXACT: Options = {"keep_ratio": 1.0}
HALF: Options = {"keep_ratio": 0.5}

UNTRIED = Recommended(default=EXACT, fast=HALF)
"""Families of which no contest has been run."""
VIT = Recommended(default=HALF, fast={"keep_ratio": 0.25, "blocks": 0.75})
"""Of images, with one stage, read at a class token."""
CONVNEXT = SWIN = Recommended(default=EXACT, fast=EXACT)
"""At equal time nothing sampled was as good."""


def read_elsewhere(family: Recommended) -> Recommended:
    """For models of a family that are not read at a class token: of such ViTs no contest has been run, and sampled
    gradients have several times as much noise."""
    return UNTRIED if family is VIT else family

"""What the keep-ratios "default" and "fast" mean for each family of models; docs/study has the evidence."""

from collections.abc import Mapping
from typing import Any, NamedTuple

Options = Mapping[str, Any]
"""Fields of ``SBPConfig``: a keep-ratio, and others, which count if the user has left them at their default."""


class Recommended(NamedTuple):
    """What is recommended for a family of models: by default, and if steps must be shorter."""

    default: Options
    fast: Options


NAMES = Recommended._fields
EXACT: Options = {"keep_ratio": 1.0}
HALF: Options = {"keep_ratio": 0.5}

UNTRIED = Recommended(default=EXACT, fast=HALF)
"""For families of which no contest has been run."""
VIT = Recommended(default=HALF, fast={"keep_ratio": 0.25, "blocks": 0.75})
"""For ViTs of images, with one stage, read at a class token."""
CONVNEXT = SWIN = Recommended(default=EXACT, fast=EXACT)
"""In the contest, nothing sampled was as good at equal time."""


def read_elsewhere(family: Recommended) -> Recommended:
    """Return what is recommended for models of a family that are not read at a class token. Of such ViTs no contest has
    been run, and their sampled gradients have several times as much noise."""
    return UNTRIED if family is VIT else family

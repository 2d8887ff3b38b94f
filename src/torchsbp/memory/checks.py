"""Arguments of estimate and plan, checked before anything is traced."""

from operator import index
from typing import Any

import torch
from torch import Tensor

from ..config import SBPConfig, refuse_preset_name
from ..errors import UsageError, UsageTypeError, expect, shown

PLAIN = ("full", "checkpoint")
PRECISIONS: dict[str, torch.dtype | None] = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": None}
ALSO = {"bfloat16": "bf16", "float16": "fp16", "fp32": "float32"}
"""Other names of precisions."""


def check_config(config: object) -> None:
    refuse_preset_name(config)
    if isinstance(config, str) and config not in PLAIN:
        names = ", ".join(map(repr, PLAIN))
        raise UsageError(f"config={config!r} is not allowed; allowed: {names}, None, an SBPConfig(…)")
    if isinstance(config, float):
        raise UsageTypeError(f"config={config!r} is a number; a keep-ratio is given as config=SBPConfig({config!r})")
    expect("config", config, (SBPConfig, str, type(None)), f"None, an SBPConfig(…), {' or '.join(map(repr, PLAIN))}")


def checked_shape(input_shape: Any) -> tuple[int, ...]:
    try:
        shape = tuple(index(n) for n in input_shape)
    except TypeError:
        raise UsageTypeError(
            f"input_shape={shown(input_shape)} is not allowed; allowed: whole numbers, batch first, such as "
            "(64, 3, 224, 224)"
        ) from None
    if not shape or min(shape) < 1:
        raise UsageError(f"input_shape={shape} is not allowed; allowed: sizes above 0, batch first")
    return shape


def check_loss(value: object) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
        raise UsageError(f"loss gave {found}; it must give one number with a gradient")


def precision_name(precision: Any) -> str:
    """Return the name of a precision, given any of its names or its dtype."""
    given = str(precision).removeprefix("torch.")
    name = ALSO.get(given, given)
    if not isinstance(precision, (str, torch.dtype)) or name not in PRECISIONS:
        names = ", ".join(repr(name) for name in (*PRECISIONS, *ALSO))
        raise UsageError(f"precision={precision!r} is not allowed; allowed: {names}")
    return name

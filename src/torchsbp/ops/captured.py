"""captured: a backward pass that a GPU may be told of in one launch."""

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .device import device_of
from .graphs import Backward, Context
from .layers import Grad


def captured(backward: Backward) -> Backward:
    """The backward of an autograd function whose ctx has a ``static``: all that is not a tensor, and can be hashed."""

    @wraps(backward)
    def wrapper(ctx: Any, dy: Tensor) -> Sequence[Grad]:
        if torch.compiler.is_compiling():
            return backward(ctx, dy)
        context = Context(ctx.saved_tensors, ctx.needs_input_grad, ctx.static)  # checkpointing unpacks a tensor once
        return device_of(dy).run_backward(backward, context, dy)

    return wrapper

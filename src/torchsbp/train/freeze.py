"""Freezing: parameters that are not trained, and norms whose running statistics stay as they are."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..errors import UsageError


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Freeze the parameters whose name, or the name of a module around them, matches a pattern (``*``, ``?``, ``[…]``).

    Return the batch and instance norms that are frozen as a whole. Put them into eval mode for training: in training
    mode their running statistics would change.
    """
    frozen: set[str] = set()
    parameters = dict(model.named_parameters())
    modules = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        within = tuple(f"{name}." for name in modules if fnmatchcase(name, pattern))
        found = {name for name in parameters if fnmatchcase(name, pattern) or name.startswith(within)}
        if not found:
            raise UsageError(
                f"freeze: {pattern!r} names no parameter of the model and no module that has one; its modules are "
                f"{', '.join(name for name, _ in model.named_children())}, such as {', '.join(modules[:4])} within"
            )
        frozen |= found
    if len(frozen) == len(parameters):
        raise UsageError(f"freeze={list(patterns)} leaves nothing to train")
    for name in frozen:
        parameters[name].requires_grad_(False)
    norms = {name: its for name, its in model.named_modules() if isinstance(its, _NormBase)}
    return [its for name, its in norms.items() if is_frozen(its, name, frozen, patterns)]


def is_frozen(norm: nn.Module, name: str, frozen: set[str], patterns: Sequence[str]) -> bool:
    """Whether all its parameters are frozen. If it has none, whether a pattern matches it or a module around it."""
    own = {f"{name}.{parameter}" for parameter, _ in norm.named_parameters(recurse=False)}
    if own:
        return own <= frozen
    parts = name.split(".")
    above = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(fnmatchcase(each, pattern) for each in above for pattern in patterns)

"""What a block is made of: dotted names of its parts, and a check that each part is one the ops know.

An adapter describes a block by these; nothing here runs a model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from torch import nn

from ..ops.activations import ACTIVATIONS, activation_of
from ..ops.layers import Norm
from ..ops.rules import RULES
from . import lora

NORMS = {
    "torch.nn.modules.normalization.LayerNorm": "layer",
    "torch.nn.modules.normalization.RMSNorm": "rms",
    "timm.layers.norm.LayerNorm": "layer",
    "timm.layers.norm.LayerNorm2d": "layer",
    "timm.layers.norm.RmsNorm": "rms",
    "torchvision.models.convnext.LayerNorm2d": "layer",
    "transformers.models.convnext.modeling_convnext.ConvNextLayerNorm": "layer",
}
LINEARS = (
    "torch.nn.modules.linear.Linear",
    "torch.nn.modules.linear.NonDynamicallyQuantizableLinear",  # the output of nn.MultiheadAttention
)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
RECORDERS = ("transformers.utils.output_capturing",)  # modules whose hooks record outputs where a caller asks for them
DROP_PATHS = (
    "torch.nn.modules.linear.Identity",
    "timm.layers.drop.DropPath",
    "torchvision.ops.stochastic_depth.StochasticDepth",
    "transformers.models.convnext.modeling_convnext.ConvNextDropPath",
    "transformers.models.dinov2.modeling_dinov2.Dinov2DropPath",
    "transformers.models.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersDropPath",
)
FUSED = {None: True, True: True, False: False, "sdpa": True, "eager": False}
"""What a library says of its attention -> whether that is F.scaled_dot_product_attention."""


def qualified(module: nn.Module | type) -> str:
    """The full name of a class, or of a module's own class, patched or not."""
    cls = module if isinstance(module, type) else type(module)
    cls = cls.__dict__.get("sbp_origin", (None, cls))[1]
    return f"{cls.__module__}.{cls.__qualname__}"


def find(module: Any, name: str) -> Any:
    """The part of that dotted name, None where there is none. ``""`` means the block has no such part."""
    if not name:
        return None
    for step in name.split("."):
        module = getattr(module, step, None)
        if module is None:
            return None
    return module


def inside(name: str, part: str) -> bool:
    """Whether the module of that dotted name is the part, or in it."""
    return name == part or (part != "" and name.startswith(f"{part}."))


@dataclass(frozen=True)
class Parts:
    """Dotted names in a block.

    ``idle`` names parts that must do nothing: inner dropout, extra norms, gates. ``classes`` says of which classes the
    modules that hold the parts must be: another one may compute something else from the same parts. ``ignored`` names
    keyword arguments of the block's forward that change nothing in it.
    """

    idle: tuple[str, ...] = ()
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    kind: ClassVar[str] = "lean"
    meaning: ClassVar[str] = "the backward pass is written out for its parts"
    """How backward runs: a word for the user, and what that means."""
    called: ClassVar[tuple[str, ...]] = ()
    """Fields whose modules are still called as modules; of the others the ops only read the parameters."""
    hooks: ClassVar[str] = "would not run in training"
    rules: ClassVar[tuple[str, ...]] = tuple(RULES)
    """The attention rules that the ops have for such a block."""

    def problems(self, block: nn.Module) -> Iterator[str]:
        """Why the ops can't run this block, one sentence each; nothing if they can."""
        for name, allowed in self.classes.items():
            if _class(find(block, name)) not in allowed:
                yield f"{name} is {_class(find(block, name))}; supported: {', '.join(allowed)}"
        called = [getattr(self, name) for name in self.called]
        if "forward" in vars(block):
            yield "its forward was replaced, which hides the one for training; restore its class's"
        for name, module in block.named_modules():
            if not name or any(inside(name, part) for part in called):
                continue
            if "forward" in vars(module):
                yield f"{name} has a forward that is not its class's, which {self.hooks}"
            if any(_acts(hook) for hook in _hooks(module)):
                yield f"{name} has hooks, which {self.hooks}; remove them first"
        for name in self.idle:
            part = find(block, name)
            if not (part is None or part in (0, False) or isinstance(part, nn.Identity) or _idle_dropout(part)):
                yield f"{name} is {part}, which is not supported (allowed: absent, Identity, Dropout with p=0)"
        for part_field in fields(self):
            check = _CHECKS.get(part_field.name)
            names = getattr(self, part_field.name)
            if check is not None and names:
                for name in (names,) if isinstance(names, str) else names:
                    yield from check(name, find(block, name))


@dataclass(frozen=True)
class TransformerBlock(Parts):
    """``x + drop1(scale1(proj(attention(norm1(x)))))``, then ``x + drop2(scale2(fc2(act(fc1(norm2(x))))))``.

    ``qkv`` is a layer, or its weight where that is a parameter of the attention module (``in_proj_weight``), or the
    three layers for queries, keys and values. ``softmax_scale`` is one over the root of a head's width where it is not
    said; ``fused`` names what says how attention is computed (``FUSED``).
    """

    called: ClassVar[tuple[str, ...]] = ("drop1", "drop2")

    norm1: str = "norm1"
    heads: str = "attn.num_heads"
    softmax_scale: str = "attn.scale"
    fused: str = "attn.fused_attn"
    qkv: str | tuple[str, str, str] = "attn.qkv"
    q_norm: str = "attn.q_norm"
    k_norm: str = "attn.k_norm"
    proj: str = "attn.proj"
    scale1: str = "ls1.gamma"
    drop1: str = "drop_path1"
    norm2: str = "norm2"
    fc1: str = "mlp.fc1"
    act: str = "mlp.act"
    fc2: str = "mlp.fc2"
    scale2: str = "ls2.gamma"
    drop2: str = "drop_path2"

    def problems(self, block: nn.Module) -> Iterator[str]:
        yield from super().problems(block)
        norms = [find(block, name) for name in (self.q_norm, self.k_norm)]
        if len({(type(n), getattr(n, "eps", None)) for n in norms}) > 1:
            yield f"{self.q_norm} and {self.k_norm} differ: {norms}"


@dataclass(frozen=True)
class ConvBlock(Parts):
    """``shortcut(x) + drop(scale(fc2(act(fc1(norm(conv(pool(x))))))))`` on ``[B, C, H, W]``.

    fc1 and fc2 are Linear or 1×1 Conv2d.
    """

    called: ClassVar[tuple[str, ...]] = ("conv", "drop", "pool", "shortcut")

    conv: str = "conv_dw"
    norm: str = "norm"
    fc1: str = "mlp.fc1"
    act: str = "mlp.act"
    fc2: str = "mlp.fc2"
    scale: str = "gamma"
    drop: str = "drop_path"
    pool: str = ""
    shortcut: str = ""


@dataclass(frozen=True)
class Downsample(Parts):
    """``conv(norm(x))`` on ``[B, C, H, W]`` with stride ≥ kernel."""

    norm: str = "0"
    down: str = "1"


@dataclass(frozen=True)
class DownsampleList(Downsample):
    """The same as a ``ModuleList``, whose members the stage calls one after the other."""


def norm_of(module: nn.Module | None) -> Norm | None:
    """What is static about a norm module, None for Identity or none."""
    if module is None or isinstance(module, nn.Identity):
        return None
    return Norm(module.eps, NORMS[qualified(module)])  # type: ignore[arg-type]


def _hooks(module: nn.Module) -> Iterator[Any]:
    return (hook for kind in HOOKS for hook in (getattr(module, kind) or {}).values())


def _acts(hook: Any) -> bool:
    return getattr(hook, "__module__", "") not in RECORDERS


def _idle_dropout(part: Any) -> bool:
    return isinstance(part, nn.Dropout) and part.p == 0


def _check_norm(name: str, part: Any) -> Iterator[str]:
    if part is None or qualified(part) not in NORMS:
        yield f"{name} is {_class(part)}; supported norms: {', '.join(NORMS)}"
    elif getattr(part, "_fast_norm", False):
        yield f"{name} uses timm's fast norm; switch it off with timm.layers.set_fast_norm(False)"


def _check_optional_norm(name: str, part: Any) -> Iterator[str]:
    if part is not None and not isinstance(part, nn.Identity):
        yield from _check_norm(name, part)


def check_linear(name: str, part: Any) -> Iterator[str]:
    """Why the ops can't read this as a matrix."""
    if lora.is_lora(part):
        yield from lora.problems(name, part)
        name, part = f"{name}.base_layer", part.base_layer
    if _class(part) not in LINEARS and not _is_pointwise(part):
        yield (
            f"{name} is {_class(part)}; supported: torch.nn.Linear, torch.nn.Conv2d with a 1×1 kernel, and peft's LoRA "
            "of these"
        )


def _check_heads(name: str, part: Any) -> Iterator[str]:
    if not isinstance(part, int):
        yield f"{name} is {part}; supported: a number of heads"


def _check_fused(name: str, part: Any) -> Iterator[str]:
    if part not in FUSED:
        yield f"{name} is {part!r}; supported: {', '.join(repr(how) for how in FUSED if isinstance(how, type(part)))}"


def _check_qkv(name: str, part: Any) -> Iterator[str]:
    if not isinstance(part, nn.Parameter):
        yield from check_linear(name, part)


def _is_pointwise(part: Any) -> bool:
    return type(part) is nn.Conv2d and part.kernel_size == part.stride == (1, 1) and part.groups == 1


def _check_activation(name: str, part: Any) -> Iterator[str]:
    if activation_of(part) is None:
        modules = [module for activation in ACTIVATIONS.values() for module in activation.modules]
        yield f"{name} is {_class(part)}; supported activations: {', '.join(modules)}"


def _check_drop_path(name: str, part: Any) -> Iterator[str]:
    if part is not None and qualified(part) not in DROP_PATHS:
        yield f"{name} is {_class(part)}; supported: {', '.join(DROP_PATHS)}"
    elif getattr(part, "mode", "row") != "row":
        yield f'{name} drops the whole batch at once (mode="{part.mode}"); supported: "row"'


def _check_down(name: str, part: Any) -> Iterator[str]:
    if type(part) is not nn.Conv2d or part.groups != 1:
        yield f"{name} is {_class(part)}; supported: torch.nn.Conv2d with one group"
    elif any(k > s for k, s in zip(part.kernel_size, part.stride, strict=True)):
        yield f"{name} has kernel {part.kernel_size} > stride {part.stride}: its outputs share inputs"
    elif part.padding != (0, 0) or part.dilation != (1, 1):
        yield f"{name} has padding {part.padding} and dilation {part.dilation}; supported: 0 and 1"


def _class(part: Any) -> str:
    return "missing" if part is None else qualified(part)


_CHECKS = {
    "norm": _check_norm,
    "norm1": _check_norm,
    "norm2": _check_norm,
    "q_norm": _check_optional_norm,
    "k_norm": _check_optional_norm,
    "heads": _check_heads,
    "fused": _check_fused,
    "qkv": _check_qkv,
    "proj": check_linear,
    "fc1": check_linear,
    "fc2": check_linear,
    "act": _check_activation,
    "drop": _check_drop_path,
    "drop1": _check_drop_path,
    "drop2": _check_drop_path,
    "down": _check_down,
}

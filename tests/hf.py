"""Tiny random models of transformers, and their oracle: the library's own forward with hooks that gate the branches."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import torchsbp
from torchsbp.adapters.parts import find
from torchsbp.ops.reference import gate

from .families import assert_gradients, entry_of, step
from .oracle import gate_map, gated_attention, rows_of

SIZES = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 64, "patch_size": 16}
VIT = {**SIZES, "intermediate_size": 48, "num_labels": 5}
DINOV2 = {**SIZES, "mlp_ratio": 2, "num_labels": 5, "layerscale_value": 0.5}
TOWER = {"vision_config": {**SIZES, "intermediate_size": 48}, "num_labels": 5}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", VIT),
    "deit": ("DeiTForImageClassification", VIT),
    "dinov2 drop path": ("Dinov2ForImageClassification", {**DINOV2, "drop_path_rate": 0.5}),
    "dinov2 eager, no bias": (
        "Dinov2ForImageClassification",
        {**DINOV2, "attn_implementation": "eager", "qkv_bias": False},
    ),
    "dinov2 with registers": ("Dinov2WithRegistersForImageClassification", {**DINOV2, "num_register_tokens": 2}),
    "clip": ("CLIPForImageClassification", TOWER),
    "siglip": ("SiglipForImageClassification", TOWER),
    "videomae": ("VideoMAEForVideoClassification", {**VIT, "num_frames": 4, "tubelet_size": 2}),
    "convnext": (
        "ConvNextForImageClassification",
        {
            **{"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 3, 1], "num_labels": 5},
            **{"layer_scale_init_value": 0.5, "drop_path_rate": 0.5},
        },
    ),
}
TRANSFORMERS = [name for name in FAMILIES if name != "convnext"]


def build(cls: str, **options: Any) -> nn.Module:
    """A model of that class with nothing at its initial zero, where errors would hide; float64, training."""
    torch.manual_seed(0)
    kind = getattr(transformers, cls)
    model = kind._from_config(kind.config_class(**options)).double().train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def model_of(family: str, **options: Any) -> nn.Module:
    cls, own = FAMILIES[family]
    return build(cls, **own | options)


class Scores(nn.Module):
    """The scores of a model as a plain tensor."""

    def __init__(self, model: nn.Module, **arguments: Any) -> None:
        super().__init__()
        self.model, self.arguments = model, arguments

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, **self.arguments)[0]


def pixels(family: str = "vit", batch: int = 2, size: tuple[int, int] = (64, 64)) -> Tensor:
    shape = (batch, 4, 3, *size) if family == "videomae" else (batch, 3, *size)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def first(block: nn.Module, *names: str) -> nn.Module:
    return next(part for name in names if (part := find(block, name)) is not None)


def install(model: nn.Module, kept: dict[str, Tensor], config: torchsbp.SBPConfig, heads: Tensor | None) -> None:
    """Give the sampled modules of an unpatched model their gated forward."""
    for name, positions in kept.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.ModuleList):
            module[1].register_forward_hook(lambda m, args, y, p=positions: gate_map(y, p))
        elif hasattr(module, "dwconv"):
            module.drop_path.register_forward_hook(lambda m, args, y, p=positions: gate_map(y, p))
            if config.scope == "block":
                module.register_forward_hook(lambda m, args, y, p=positions: gate_map(y, p))
        else:
            module.forward = gated_forward(module, positions, config, heads)


def gated_forward(block: nn.Module, positions: Tensor, config: torchsbp.SBPConfig, heads: Tensor | None) -> Any:
    """The block's own forward. In scope "block", gating its output leaves nothing of the residual between either."""

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows = rows_of(positions, x.shape[1])
        with gated_attention(config.attention, rows, x.shape[:2], None), gated_branches(block, rows, config, heads):
            y = type(block).forward(block, x, *args, **kwargs)
        return gate(y, rows) if config.scope == "block" else y

    return forward


@contextmanager
def gated_branches(block: nn.Module, rows: Tensor, config: torchsbp.SBPConfig, heads: Tensor | None) -> Iterator[None]:
    """Hooks on the last module of each branch. Under rule "head" heads outside ``heads`` contribute a constant."""
    proj = first(block, "attention.o_proj", "attention.output.dense", "self_attn.out_proj")
    ends = getattr(block, "layer_scale1", proj), first(block, "layer_scale2", "mlp.fc2", "output.dense")
    inputs: list[Tensor] = []

    def attention_end(module: nn.Module, args: Any, y: Tensor) -> Tensor:
        if config.attention != "head":
            return gate(y, rows)
        if heads is None:
            return y
        by_head = inputs[-1].unflatten(-1, (3, -1))
        silent = torch.tensor([h for h in range(3) if h not in heads])
        kept = proj.forward(by_head.index_fill(-2, silent, 0).flatten(-2))
        kept = kept if module is proj else module.forward(kept)
        return kept + (y - kept).detach()

    with ExitStack() as stack:
        for handle in (
            proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0])),
            ends[0].register_forward_hook(attention_end),
            ends[1].register_forward_hook(lambda module, args, y: gate(y, rows)),
        ):
            stack.callback(handle.remove)
        yield


def check_against_oracle(model: nn.Module, plain: nn.Module, config: torchsbp.SBPConfig, x: Tensor) -> None:
    """Output and gradients of the model, patched here, against those of ``plain``, its unpatched twin."""
    torchsbp.apply(model, config=config)
    y, gradients = step(model, x)
    install(plain, torchsbp.kept(model), config, entry_of(model).sbp.masks.kept_heads[0])
    expected_y, expected = step(plain, x)
    torch.testing.assert_close(y, expected_y, rtol=1e-12, atol=1e-12)
    assert_gradients(gradients, expected)

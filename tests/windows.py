"""Tiny models with attention in windows, and their oracle: the library's own forward, gated by hooks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import transformers
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.swin_transformer_v2_cr import SwinTransformerV2Cr
from torch import nn
from torchvision.models import swin_transformer as vision
from torchvision.models.video.swin_transformer import SwinTransformer3d

from torchsbp import SBPConfig
from torchsbp.ops.reference import gate

from .families import check_gated
from .oracle import rows_of

DEPTHS, HEADS = (2, 2), (2, 3)


def timm_swin(cls: type, **options: object) -> Callable[..., nn.Module]:
    sizes = {"img_size": 64, "patch_size": 4, "window_size": 4, "embed_dim": 12, "drop_path_rate": 0.0}
    return partial(cls, **{"depths": DEPTHS, "num_heads": HEADS, "num_classes": 5} | sizes | options)


def torchvision_swin(window: tuple[int, ...], **options: object) -> Callable[..., nn.Module]:
    def build(drop_path_rate: float = 0.0, **more: object) -> nn.Module:
        cls = SwinTransformer3d if len(window) == 3 else vision.SwinTransformer
        sizes = {"patch_size": [2, 4, 4][-len(window) :], "window_size": list(window), "embed_dim": 12}
        sizes |= {"depths": DEPTHS, "num_heads": HEADS, "num_classes": 5, "stochastic_depth_prob": drop_path_rate}
        return cls(**sizes | options | more)

    return build


class Scores(nn.Module):
    """The scores of a transformers model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).logits


def transformers_swin(name: str, **options: object) -> Callable[..., nn.Module]:
    def build(drop_path_rate: float = 0.0, **more: object) -> nn.Module:
        config = getattr(transformers, f"{name}Config")(
            **{"image_size": 64, "patch_size": 4, "window_size": 4, "embed_dim": 12, "num_labels": 5}
            | {"depths": list(DEPTHS), "num_heads": list(HEADS), "drop_path_rate": drop_path_rate}
            | options
            | more
        )
        return Scores(getattr(transformers, f"{name}ForImageClassification")(config))

    return build


@dataclass
class Family:
    """How to build a model, the size of its input, and the parts that end its branches."""

    build: Callable[..., nn.Module]
    size: tuple[int, ...] = (64, 64)
    ends: tuple[str, ...] = ("drop_path1", "drop_path2")

    def model(self, **options: object) -> nn.Module:
        torch.manual_seed(0)
        model = self.build(**options).double().train()
        with torch.no_grad():
            for p in model.parameters():  # nothing at its initial zero or 1e-6, where errors would hide
                p.add_(torch.randn_like(p) * 0.1)
        return model

    def images(self, batch: int = 2) -> torch.Tensor:
        return torch.randn(batch, 3, *self.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


DEPTH = ("stochastic_depth",)
V2 = {"block": vision.SwinTransformerBlockV2, "downsample_layer": vision.PatchMergingV2}
FREE = {"strict_img_size": False, "always_partition": True}
FAMILIES = {
    "timm": Family(timm_swin(SwinTransformer)),
    "timm, padded": Family(timm_swin(SwinTransformer, window_size=5, **FREE), (36, 52)),
    "timm, window of the grid": Family(timm_swin(SwinTransformer, window_size=8, img_size=32), (32, 32)),
    "timm v2": Family(timm_swin(SwinTransformerV2)),
    "timm v2, padded": Family(timm_swin(SwinTransformerV2, window_size=(5, 3), **FREE), (36, 52)),
    "timm CR": Family(timm_swin(SwinTransformerV2Cr, init_values=0.5)),
    "timm CR, padded, norms": Family(
        timm_swin(SwinTransformerV2Cr, window_size=(3, 5), extra_norm_stage=True, init_values=None, **FREE), (36, 52)
    ),
    "torchvision": Family(torchvision_swin((4, 4)), ends=DEPTH),
    "torchvision, padded": Family(torchvision_swin((5, 5)), (36, 52), DEPTH),
    "torchvision v2": Family(torchvision_swin((4, 4), **V2), ends=DEPTH),
    "torchvision v2, padded": Family(torchvision_swin((5, 3), **V2), (36, 20), DEPTH),
    "video": Family(torchvision_swin((2, 4, 4)), (8, 32, 32), DEPTH),
    "video, padded": Family(torchvision_swin((4, 3, 5)), (10, 36, 28), DEPTH),
    "transformers": Family(transformers_swin("Swin"), ends=("drop_path", "mlp")),
    "transformers, padded": Family(transformers_swin("Swin", window_size=3), (36, 52), ("drop_path", "mlp")),
    "transformers v2": Family(transformers_swin("Swinv2"), ends=("drop_path",)),
    "transformers v2, padded": Family(transformers_swin("Swinv2", window_size=3), (36, 52), ("drop_path",)),
}


def install(model: nn.Module, kept: dict[str, torch.Tensor], family: Family, scope: str) -> None:
    """Gate the end of every branch of the sampled blocks, or in scope "block" their second sum."""

    def gated(y: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return gate(y, rows_of(positions, y.shape[1:-1].numel()))

    def after(module: nn.Module, args: tuple, y: object, positions: torch.Tensor) -> object:
        return (gated(y[0], positions), *y[1:]) if isinstance(y, tuple) else gated(y, positions)

    def before(module: nn.Module, args: tuple, positions: torch.Tensor) -> tuple:
        return (gated(args[0], positions),)

    for name, positions in kept.items():
        block = model.get_submodule(name)
        if scope == "branch":
            for end in family.ends:
                block.get_submodule(end).register_forward_hook(partial(after, positions=positions))
        elif hasattr(block, "norm3"):
            block.norm3.register_forward_pre_hook(partial(before, positions=positions))
        else:
            block.register_forward_hook(partial(after, positions=positions))


def check_against_oracle(family: Family, model: nn.Module, config: SBPConfig, x: torch.Tensor) -> None:
    check_gated(model, config, x, partial(install, family=family, scope=config.scope))

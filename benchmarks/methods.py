"""The methods that are compared: plain training, other ways to save memory, and SBP. They prepare a model to train."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import torchsbp
from torchsbp import SBPConfig
from torchsbp.memory.estimate import checkpoint_blocks
from torchsbp.ops import wrap
from torchsbp.sampling import samplers
from torchsbp.sampling.keys import draw_key


@dataclass(frozen=True)
class Method:
    """``prepare`` changes the model in place; ``build`` are options of its constructor; ``around`` wraps every forward.

    ``eager`` and ``compiled`` say in which modes the method has an effect, ``only`` what the model's name must contain.
    """

    prepare: Callable[[nn.Module], Any] = lambda model: model
    build: dict[str, Any] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    eager: bool = True
    compiled: bool = True
    only: str = ""

    def suits(self, model: str, mode: str) -> bool:
        return self.only in model and (self.eager if mode == "eager" else self.compiled)


GRID = SBPConfig.preset("paper", attention="query")
"""One grid mask for the batch and all blocks, as in the image paper, with our rule "query"."""

NORM = SBPConfig(sampler="norm")
"""Rows chosen in backward."""


def sbp(only: str = "", config: SBPConfig = GRID, **options: Any) -> Method:
    return Method(lambda model: torchsbp.apply(model, config=config, **options), only=only)


def sbp_and_checkpoint(**options: Any) -> Method:
    """SBP with ``recompute=False``; the blocks that are not sampled are checkpointed."""

    def prepare(model: nn.Module) -> None:
        torchsbp.apply(model, config=GRID, recompute=False, **options)
        checkpoint_blocks(model, lambda block: block.sbp.sampling.site is None)  # type: ignore[union-attr]

    return Method(prepare)


def algorithm_1(ratio: float) -> Callable[[nn.Module], None]:
    """Algorithm 1 as printed, on the last two thirds of a ViT: kept rows with gradients, the rest without."""

    def prepare(model: nn.Module) -> None:
        grid = tuple(model.patch_embed.grid_size)  # type: ignore[union-attr, arg-type]
        step = torch.zeros((), dtype=torch.int64, device=next(model.parameters()).device)
        order = samplers.SAMPLERS["grid"](grid, (ratio,), draw_key(0, step, 0, 1))
        kept = samplers.first(order, samplers.count("grid", grid, ratio))[0] + 1
        keep = torch.cat([torch.zeros_like(kept[:1]), kept])
        for block in list(model.blocks)[len(model.blocks) // 3 :]:  # type: ignore[arg-type]
            block.forward = lambda x, block=block: algorithm_1_block(block, x, keep)

    return prepare


def algorithm_1_block(block: nn.Module, x: Tensor, keep: Tensor) -> Tensor:
    """Queries of kept and dropped rows attend to all keys in two calls; the MLP runs in two parts."""
    attn: Any = block.attn
    n = block.norm1(x)  # type: ignore[operator]

    def attend(rows: Tensor) -> Tensor:
        q, k, v = attn.qkv(n).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        o = nn.functional.scaled_dot_product_attention(q.index_select(2, rows), k, v)
        return attn.proj(o.transpose(1, 2).flatten(2))

    drop = wrap.complement(keep, x.shape[1])
    kept = attend(keep)
    with torch.no_grad():
        dropped = attend(drop)
    x = x + wrap.merge(kept, keep, dropped, drop, 1)
    return x + torchsbp.sbp(lambda rows: block.mlp(block.norm2(rows)), x, keep)  # type: ignore[operator]


@contextmanager
def memory_budget(share: float) -> Iterator[None]:
    """The activation memory budget of torch.compile."""
    import torch._functorch.config as config

    with config.patch(activation_memory_budget=share):
        yield


def offload() -> AbstractContextManager[Any]:
    return torch.autograd.graph.save_on_cpu(pin_memory=True)


METHODS = {
    "full": Method(),
    "checkpoint": Method(checkpoint_blocks),
    "budget 0.5": Method(around=lambda: memory_budget(0.5), eager=False),
    "offload": Method(around=offload, compiled=False),
    "algorithm 1, r=0.5": Method(algorithm_1(0.5), only="vit"),
    "patch drop 0.5": Method(build={"patch_drop_rate": 0.5}, only="vit"),
    "exact, lean (r=1)": sbp(keep_ratio=1.0),
    "exact, lean (r=1), a twelfth saved": sbp(keep_ratio=1.0, recompute=11 / 12),
    "exact, lean (r=1), a sixth saved": sbp(keep_ratio=1.0, recompute=5 / 6),
    "sbp query r=0.5": sbp(keep_ratio=0.5),
    "sbp query r=0.5, saved": sbp(keep_ratio=0.5, recompute=False),
    "sbp query r=0.5, saved + checkpoint": sbp_and_checkpoint(keep_ratio=0.5),
    "sbp query r=0.25": sbp(keep_ratio=0.25),
    "sbp query r=0.25, per sample": sbp(keep_ratio=0.25, per_sample=True),
    "sbp query r=0.25, half saved": sbp(keep_ratio=0.25, recompute=0.5),
    "sbp query r=0.25, saved": sbp(keep_ratio=0.25, recompute=False),
    "sbp query r=0.25, all blocks": sbp(keep_ratio=0.25, blocks=1.0),
    "own rows r=0.5": sbp(config=SBPConfig(), keep_ratio=0.5),
    "own rows r=0.25": sbp(config=SBPConfig(), keep_ratio=0.25),
    "own rows r=0.25, 9 of 12 blocks": sbp(config=SBPConfig(), keep_ratio=0.25, blocks=0.75, only="vit"),
    "norm rows r=0.5": sbp(config=NORM, keep_ratio=0.5),
    "norm rows r=0.25": sbp(config=NORM, keep_ratio=0.25),
    "norm rows r=0.5 to 0.125": sbp(config=NORM, keep_ratio=(0.5, 0.125), only="vit"),
    "norm rows r=0.75 to 0.125, all blocks": sbp(config=NORM, keep_ratio=(0.75, 0.125), blocks=1.0, only="vit"),
    "norm rows r=0.5 to 0.0625, all blocks": sbp(config=NORM, keep_ratio=(0.5, 0.0625), blocks=1.0, only="vit"),
    "sbp frames r=0.5": sbp(keep_ratio=0.5, sampler="frames", only="video"),
    "sbp frames r=0.25": sbp(keep_ratio=0.25, sampler="frames", only="video"),
    "sbp frames r=0.125": sbp(keep_ratio=0.125, sampler="frames", only="video"),
    "sbp qkv r=0.5": sbp(keep_ratio=0.5, attention="qkv", only="vit"),
    "sbp qkv r=0.5, quarter saved": sbp(keep_ratio=0.5, attention="qkv", recompute=0.75, only="vit"),
    "sbp qkv r=0.5, saved": sbp(keep_ratio=0.5, attention="qkv", recompute=False, only="vit"),
}

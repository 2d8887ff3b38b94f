"""The oracle: the model library's own forward with ``gate`` inserted at the rows the patched model kept."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchsbp
from torchsbp.ops.reference import drop_qkv, gate, mask


def rows_of(positions: Tensor, n: int) -> Tensor:
    """``kept`` positions [B, k] as flat rows."""
    return (positions + n * torch.arange(positions.shape[0], device=positions.device)[:, None]).flatten()


def gate_map(y: Tensor, positions: Tensor) -> Tensor:
    """``gate`` on ``[B, C, H, W]``."""
    y = y.permute(0, 2, 3, 1)
    return gate(y, rows_of(positions, y.shape[1] * y.shape[2])).permute(0, 3, 1, 2)


def timm_block(block: nn.Module, x: Tensor, positions: Tensor, rule: str, scope: str, heads: Tensor | None) -> Tensor:
    rows = rows_of(positions, x.shape[1])
    branch = attention_branch(block, x, rule, rows, heads)
    attention_rows = None if rule == "head" else rows
    x = x + gate(branch, attention_rows) if scope == "branch" else gate(x + branch, attention_rows)
    branch = block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
    return x + gate(branch, rows) if scope == "branch" else gate(x + branch, rows)


def attention_branch(block: nn.Module, x: Tensor, rule: str, rows: Tensor, heads: Tensor | None) -> Tensor:
    """The block's own attention; outside ``heads`` the contribution of a head is a constant."""

    def branch(silent: Tensor | None) -> Tensor:
        with gated_attention(rule, rows, x.shape[:2], silent):
            return block.ls1(block.attn(block.norm1(x)))

    y = branch(None)
    if heads is not None:
        kept = branch(torch.tensor([h for h in range(block.attn.num_heads) if h not in heads]))
        y = kept + (y - kept).detach()
    return block.drop_path1(y)


@contextmanager
def gated_attention(rule: str, rows: Tensor, shape: torch.Size, silent: Tensor | None) -> Iterator[None]:
    """The library calls F.scaled_dot_product_attention; here that is written out and gated, some heads silenced."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *args: object, **kwargs: object) -> Tensor:
        m = q @ k.mT * q.shape[-1] ** -0.5
        if rule == "qkv":
            m, v = drop_qkv(m, v, mask(rows, shape)[:, None])
        o = m.softmax(-1) @ v
        return o if silent is None else o.index_fill(1, silent, 0)

    plain, F.scaled_dot_product_attention = F.scaled_dot_product_attention, attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def torchvision_block(
    block: nn.Module, x: Tensor, positions: Tensor, rule: str, scope: str, heads: Tensor | None
) -> Tensor:
    rows = rows_of(positions, x.shape[1])

    def attend(silent: Tensor | None) -> Tensor:
        n = block.ln_1(x)
        with gated_attention(rule, rows, x.shape[:2], silent):
            return block.self_attention(n, n, n, need_weights=False)[0]

    branch = attend(None)
    if heads is not None:
        kept = attend(torch.tensor([h for h in range(block.num_heads) if h not in heads]))
        branch = kept + (branch - kept).detach()
    attention_rows = None if rule == "head" else rows
    x = x + gate(branch, attention_rows) if scope == "branch" else gate(x + branch, attention_rows)
    branch = block.mlp(block.ln_2(x))
    return x + gate(branch, rows) if scope == "branch" else gate(x + branch, rows)


def timm_convnext_block(block: nn.Module, x: Tensor, positions: Tensor, scope: str) -> Tensor:
    y = block.conv_dw(x)
    if block.use_conv_mlp:
        y = block.mlp(block.norm(y))
    else:
        y = block.mlp(block.norm(y.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
    if block.gamma is not None:
        y = y * block.gamma.reshape(1, -1, 1, 1)
    return residual(block.drop_path(y), x, positions, scope)


def torchvision_convnext_block(block: nn.Module, x: Tensor, positions: Tensor, scope: str) -> Tensor:
    # The branch is position-wise behind its convolution, so gating its output gates all of it.
    return residual(block.stochastic_depth(block.layer_scale * block.block(x)), x, positions, scope)


def residual(y: Tensor, x: Tensor, positions: Tensor, scope: str) -> Tensor:
    return x + gate_map(y, positions) if scope == "branch" else gate_map(x + y, positions)


def install(model: nn.Module, kept: dict[str, Tensor], config: torchsbp.SBPConfig, heads: Tensor | None = None) -> None:
    """Give the sampled modules of an unpatched model their gated forward."""
    for name, positions in kept.items():
        module = model.get_submodule(name)
        kind = type(module).__name__
        if kind == "Block":
            module.forward = lambda x, m=module, p=positions: timm_block(m, x, p, config.attention, config.scope, heads)
        elif kind == "EncoderBlock":
            module.forward = lambda x, m=module, p=positions: torchvision_block(
                m, x, p, config.attention, config.scope, heads
            )
        elif kind == "ConvNeXtBlock":
            module.forward = lambda x, m=module, p=positions: timm_convnext_block(m, x, p, config.scope)
        elif kind == "CNBlock":
            module.forward = lambda x, m=module, p=positions: torchvision_convnext_block(m, x, p, config.scope)
        else:
            assert kind == "Sequential", kind
            module.forward = lambda x, m=module, p=positions: gate_map(m[1](m[0](x)), p)

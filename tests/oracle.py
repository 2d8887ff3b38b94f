"""The oracle: a patched model against its unpatched twin, the library's own forward, gated at what was kept."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchsbp
from torchsbp import SBPConfig
from torchsbp.adapters.names import find
from torchsbp.patching.check import Gate, install_gate, install_gates
from torchsbp.patching.entry import entries

from .steps import Gradients, assert_gradients, step

Install = Callable[[nn.Module, nn.Module], None]


def check_definition(
    model: nn.Module, config: SBPConfig, x: Tensor, install: Install = install_gates
) -> tuple[nn.Module, Gradients]:
    """Patched here, the model has output, buffers and gradients of its plain copy, gated by ``install(plain, model)``:
    that copy, and the gradients."""
    plain = copy.deepcopy(model)
    torchsbp.apply(model, config=config)
    return plain, check_step(model, plain, x, install)


def check_step(model: nn.Module, plain: nn.Module, x: Tensor, install: Install = install_gates) -> Gradients:
    """The same for a patched model and a plain one, which is gated here."""
    y, gradients = step(model, x)
    install(plain, model)
    expected_y, expected = step(plain, x)
    torch.testing.assert_close(y, expected_y, rtol=1e-12, atol=1e-12)
    assert_gradients(gradients, expected)
    buffers = dict(model.named_buffers())
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, rtol=1e-12, atol=1e-12, equal_nan=True)
    return gradients


def check_rule(model: nn.Module, config: SBPConfig, x: Tensor) -> Gradients:
    """``check_definition`` with attention written out, for every rule."""
    return check_definition(model, config, x, install_rule)[1]


def install_rule(twin: nn.Module, patched: nn.Module) -> None:
    """Gate rows of the sampled blocks of an unpatched model, and their attention by the rule of the patched one."""
    for module in twin.modules():
        if hasattr(module, "set_attn_implementation"):
            module.set_attn_implementation("sdpa")  # also where the patched one's is eager
    for entry, module in entries(patched):
        config, drawn = entry.config, entry.masks.drawn.sites
        for index, sampled in enumerate(entry.sampled):
            block, parts = twin.get_submodule(entry.prefix + sampled.name), sampled.description
            gate = Gate.of(entry.masks, index, entry.step(module).device)
            if config.attention in ("head", "exact"):
                gate_heads(block, gate, parts, config, drawn[index].heads)
            else:
                install_gate(block, gate, parts, config)
                gate_attention(block, gate if config.attention == "qkv" else None)


def gate_attention(block: nn.Module, gate: Gate | None) -> None:
    """Rule "query" needs no more than gated rows; "qkv" gates scores and values too."""
    own = block.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with written_out(keep=None if gate is None else gate.mask(x).mT):
            return own(x, *args, **kwargs)

    block.forward = forward


@contextmanager
def written_out(keep: Tensor | None = None, silent: Tensor | None = None) -> Iterator[None]:
    """F.scaled_dot_product_attention, which the libraries call, with scores and values gated at the rows ``keep``
    (``[B, 1, N]``), and some heads silenced."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *args: object, **kwargs: object
    ) -> Tensor:
        m = q @ k.mT * q.shape[-1] ** -0.5 + (0 if attn_mask is None else attn_mask)
        if keep is not None:
            rows = keep.unsqueeze(-1)
            m, v = torch.where(rows & rows.mT, m, m.detach()), torch.where(rows, v, v.detach())
        o = m.softmax(-1) @ v
        return o if silent is None else o.index_fill(1, silent, 0)

    plain, F.scaled_dot_product_attention = F.scaled_dot_product_attention, attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def gate_heads(block: nn.Module, gate: Gate, parts: Any, config: SBPConfig, heads: Tensor | None) -> None:
    """Outside ``heads`` (None: all) the contribution of a head is a constant; rows of the MLP alone are gated.

    A first run with the other heads silenced gives what the kept ones contribute at the end of the attention branch.
    """
    own, end, n = block.forward, attention_end(block, parts), int(find(block, parts.heads))
    dropped = [h for h in range(n) if heads is not None and h not in heads]
    silent = torch.tensor(dropped, dtype=torch.long, device=gate.positions.device)
    middle: list[Tensor] = []
    find(block, parts.norm2 or parts.fc1).register_forward_pre_hook(lambda module, args: middle.append(args[0]))

    def forward(*args: Any, **kwargs: Any) -> Any:
        contributed: list[Tensor] = []
        with torch.random.fork_rng(), written_out(silent=silent), hooked(end, contributed.append):
            own(*args, **kwargs)
        (kept,) = contributed
        with written_out(), hooked(end, lambda y: kept + (y - kept).detach()):
            y = own(*args, **kwargs)
        y, *rest = y if isinstance(y, tuple) else (y,)
        y = gate(y, middle[-1] if config.scope == "branch" else None, config.scale == "rows")
        return (y, *rest) if rest else y

    block.forward = forward


def attention_end(block: nn.Module, parts: Any) -> nn.Module:
    """The last module of the attention branch but for stochastic depth: layer scale, or the projection. Where the
    block's own code multiplies by the scale, stochastic depth."""
    holder = find(block, parts.proj.rpartition(".")[0])
    if isinstance(holder, nn.MultiheadAttention):  # its projection runs inside of it
        return holder
    if isinstance(find(block, parts.scale1), Tensor) and "." not in parts.scale1:
        return find(block, parts.drop1)
    scale = find(block, parts.scale1.rpartition(".")[0])
    return scale if isinstance(scale, nn.Module) else find(block, parts.proj)


@contextmanager
def hooked(module: nn.Module, change: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """The module's output, or the first of its outputs, goes through ``change``; None leaves it as it is. Of a module
    that both branches call, stochastic depth, that is the first call's."""

    def hook(module: nn.Module, args: Any, y: Any) -> Any:
        handle.remove()
        if not isinstance(y, tuple):
            return change(y)
        changed = change(y[0])
        return None if changed is None else (changed, *y[1:])

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()

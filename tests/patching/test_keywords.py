"""Modules that are called by keyword: the model's entry, its blocks, and the attention inside of them."""

import pytest
import torch
from torch import Tensor, nn

import torchsbp
from torchsbp import adapters
from torchsbp.adapters import Adapter, Layout, Mixer, Residual

from ..steps import check_compiled


class Attention(nn.MultiheadAttention):
    """Of another class: nothing is known of it, and it runs on all rows."""


class Block(nn.Module):
    def __init__(self, attention: type[nn.Module], by_name: tuple[str, ...]) -> None:
        super().__init__()
        self.norm, self.attn, self.by_name = nn.LayerNorm(8), attention(8, 2, batch_first=True), by_name

    def forward(self, hidden_states: Tensor) -> Tensor:
        n = self.norm(input=hidden_states)
        given = [n] * (3 - len(self.by_name))
        return hidden_states + self.attn(*given, need_weights=False, **dict.fromkeys(self.by_name, n))[0]


class Model(nn.Module):
    def __init__(self, *about: object) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 16, 16)
        self.layers = nn.ModuleList(Block(*about) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(input=x).flatten(2).mT
        for layer in self.layers:
            x = layer(hidden_states=x)
        return x.mean(1)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(adapters, "ADAPTERS", list(adapters.ADAPTERS))
    block = Residual(mixers=(Mixer("attn", "norm"),))
    torchsbp.register(Adapter("named", {Block: block}, Layout(Model, entry="patches", stages="layers")))


@pytest.mark.parametrize("attention", [nn.MultiheadAttention, Attention])
@pytest.mark.parametrize("by_name", [(), ("value",), ("key", "value"), ("value", "key", "query")])
def test_rows_that_are_given_by_name_have_the_gradients_of_the_definition(attention, by_name):
    model = torchsbp.apply(Model(attention, by_name), 0.5, per_sample=True)
    assert torchsbp.check(model, torch.randn(2, 3, 64, 96)).passed


class Masked(Block):
    """Whose mask, of all positions, has no name in the call."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        n, mask = self.norm(hidden_states), torch.full((24, 24), -1.0, dtype=hidden_states.dtype).triu(1)
        return hidden_states + self.attn(n, n, n, None, False, mask)[0]


@pytest.mark.parametrize("attention", [nn.MultiheadAttention, Attention])
def test_a_mask_that_is_given_by_position(attention):
    model = Model(attention, ())
    model.layers = nn.ModuleList(Masked(attention, ()) for _ in range(3))
    block = Residual(mixers=(Mixer("attn", "norm"),))
    torchsbp.register(Adapter("masked", {Masked: block}, Layout(Model, entry="patches", stages="layers")))
    assert torchsbp.check(torchsbp.apply(model, 0.5), torch.randn(2, 3, 64, 96)).passed


class Passing(Block):
    """Which returns its other arguments too."""

    def forward(self, hidden_states: Tensor, grid: tuple[int, int], note: str) -> tuple[Tensor, tuple[int, int], str]:
        return super().forward(hidden_states), grid, note


class PassingModel(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        others = (4, 6), "note"
        for layer in self.layers:
            x, *found = layer(note=others[1], hidden_states=x, grid=others[0])
            assert tuple(found) == others
        return x.mean(1)


def test_arguments_that_are_given_by_name_are_returned_in_their_order():
    model = PassingModel(nn.MultiheadAttention, ())
    model.layers = nn.ModuleList(Passing(nn.MultiheadAttention, ()) for _ in range(3))
    block = Residual(mixers=(Mixer("attn", "norm"),), passes=True)
    torchsbp.register(Adapter("passing", {Passing: block}, Layout(PassingModel, entry="patches", stages="layers")))
    assert torchsbp.check(torchsbp.apply(model, 0.5), torch.randn(2, 3, 64, 96)).passed


def test_they_compile():
    model = torchsbp.apply(Model(nn.MultiheadAttention, ("query", "key", "value")).double(), 0.5)
    check_compiled(model, torch.randn(2, 3, 64, 96, dtype=torch.double), "aot_eager", steps=2)

"""What stands before a user's class hides none of its parts, whatever these are called."""

import copy
import inspect
import pickle
import re
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor, nn

import torchsbp
from torchsbp import adapters
from torchsbp.adapters import Adapter, Layout, Mixer, Residual
from torchsbp.errors import UsageError
from torchsbp.patching import entry, replay, sampled, site
from torchsbp.patching.check import install_gates
from torchsbp.sampling.masks import Forward, Kept, Masks, SiteSpec

from ..models import images
from ..steps import assert_gradients, check_copies, check_left_as_it_was, step

HELPERS = {site.Strategy, sampled.Sampling, replay.Replay, replay.Call, replay.Again, replay.Positions, entry.Entry}
HELPERS |= {entry.SampledModule, Masks, SiteSpec, Kept, Forward}


def subclasses(cls: type) -> set[type]:
    return {cls}.union(*(subclasses(each) for each in cls.__subclasses__()))


def names_in(cls: type) -> set[str]:
    """What an object of the class has: attributes, methods, fields, and what its methods set."""
    found = {name for name in dir(cls) if not hasattr(object, name)}
    found |= {name for each in cls.__mro__ for name in getattr(each, "__annotations__", {})}
    if hasattr(cls, "__dataclass_fields__"):
        found |= {its.name for its in fields(cls)}
    if "self." in (source := inspect.getsource(cls)):
        found |= {word.split()[0].rstrip(",:=)") for word in source.split("self.")[1:]}
    return {name for name in found if name.isidentifier() and not name.startswith("__")}


def names() -> list[str]:
    """Every name that patching uses, but for its own and those that PyTorch's modules have already."""
    classes = HELPERS | {each for strategy in sampled.STRATEGIES.values() for each in strategy.__mro__[:-1]}
    classes |= subclasses(site.Strategy)
    used = {name for cls in classes for name in names_in(cls)}
    used |= {name for module in (site, sampled, replay, entry) for name in vars(module) if not name.startswith("__")}
    return sorted(name for name in used if not hasattr(nn.Module(), name) and name != adapters.base.NAME)


NAMES = names()


class Parts(nn.Module):
    """``x + Σ part(norm(x))``: linear layers and parameters, half of all names each, beside an attention."""

    def __init__(self, dim: int, names: list[str]) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(dim), nn.MultiheadAttention(dim, 2, batch_first=True)
        for i, name in enumerate(names):
            setattr(self, name, nn.Linear(dim, dim) if i % 2 else nn.Parameter(torch.randn(dim)))
        self.names_of_parts = tuple(names)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        y = self.attn(n, n, n, need_weights=False)[0]
        for name in self.names_of_parts:
            part = getattr(self, name)
            y = y + (part(x).sin() if isinstance(part, nn.Module) else x * part) / len(self.names_of_parts or "1")
        return x + y


class Model(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 16, 16)
        self.layers = nn.ModuleList(Parts(8, names) for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(adapters, "ADAPTERS", list(adapters.ADAPTERS))
    block = Residual(mixers=(Mixer("attn", "norm"),))
    torchsbp.register(Adapter("parts", {Parts: block}, Layout(Model, entry="patches", stages="layers")))


def build(names: list[str] = NAMES) -> nn.Module:
    torch.manual_seed(0)
    return Model(names).double().train()


def test_the_names_are_those_that_matter():
    assert len(NAMES) > 60
    assert set(NAMES) >= {
        "branch", "run", "compute", "replay", "description", "sampling", "kept", "original", "execute", "records",
        "recall", "record", "positions", "rows", "again", "where", "masks", "counts", "step", "prefix", "block", "part",
    }  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"scope": "block", "recompute": False}, {"per_sample": True}], ids=str)
def test_parts_named_like_everything_of_ours_train(options):
    plain = build()
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=0.5, **options)
    y, found = step(model, images())
    install_gates(plain, model)
    expected_y, expected = step(plain, images())
    assert torch.equal(y, expected_y)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert_gradients(found, expected)


def test_parts_named_like_everything_of_ours_evaluate_copy_and_are_left_as_they_were():
    check_left_as_it_was(build(), images(), keep_ratio=0.5)
    check_copies(torchsbp.apply(build(), keep_ratio=0.5), images())
    patched = torchsbp.apply(build(), keep_ratio=0.5)
    loaded = pickle.loads(pickle.dumps(patched))
    assert all(isinstance(getattr(loaded.layers[0], name), nn.Module | nn.Parameter) for name in NAMES)
    torchsbp.remove(loaded)
    plain = build().eval()
    assert torch.equal(loaded.eval()(images()), plain(images()))


@pytest.mark.parametrize("i", [0, 1], ids=["parameter", "module"])
def test_the_one_name_that_is_taken_is_refused(i):
    model = build(["a", "sbp"] if i else ["sbp"])
    with pytest.raises(
        ValueError, match=r"layers.0: a part of it is called 'sbp', the name that torchsbp needs; rename"
    ):
        torchsbp.apply(model)
    assert not any(isinstance(m, site.Site) for m in model.modules())
    assert isinstance(model.layers[0].sbp, nn.Module | nn.Parameter)


def test_three_names_stand_before_a_users_class():
    own = {name for name in vars(site.Site) if not name.startswith("__")}
    assert own | set(inspect.get_annotations(site.Site)) == {"forward", "train", "sbp"}
    assert own >= {"forward", "train"}
    bound = site.bound_class(Parts)
    assert {name for name in vars(bound) if not name.startswith("__")} == {"sbp_origin"}


def test_the_same_in_the_entry():
    model = build([])
    model.patches.sbp = nn.Linear(1, 1)
    message = r"parts: the entry, torch.nn.modules.conv.Conv2d: a part of it is called 'sbp'"
    with pytest.raises(ValueError, match=message):
        torchsbp.apply(model)
    assert not any(isinstance(m, site.Site) for m in model.modules())


@pytest.mark.parametrize(
    "entry, found", [("patch_embed", "missing"), ("act", "torch.nn.modules.activation.GELU"), ("scale", "builtins.int")]
)
def test_an_entry_that_is_no_module_with_a_parameter_is_refused(entry, found):
    model = build([])
    model.act, model.scale = nn.GELU(), 2
    (adapter,) = (its for its in adapters.ADAPTERS if its.name == "parts")
    torchsbp.register(replace(adapter, layouts=Layout(Model, entry=entry, stages="layers")))
    message = f"parts: the entry '{entry}' of {Model.__module__}.Model is {found}; allowed: the name of a module with"
    with pytest.raises(UsageError, match=re.escape(message)):
        torchsbp.apply(model)
    assert not any(isinstance(m, site.Site) for m in model.modules())

"""Blocks run again on kept rows by their own forward, tokens: what they save, how they compose, other arguments."""

import copy

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F

import torchsbp
from torchsbp import SBPConfig
from torchsbp.adapters import queries
from torchsbp.memory.plan import levels
from torchsbp.patching import replay
from torchsbp.patching.check import install_gates

from ..counting import PRODUCTS, Operators, SavedBytes, counting_backend
from ..models import TOKENS
from ..steps import (
    GRID,
    assert_gradients,
    check_compiled,
    check_copies,
    check_left_as_it_was,
    distance,
    gradients_of,
    loss_of,
    step,
)


@pytest.mark.parametrize("name", ["eva02, own norm", "beit, own norm", "differential attention", "parallel"])
def test_a_mixer_that_nobody_described_runs_on_all_rows_to_the_same_gradients(name, monkeypatch):
    model = torchsbp.apply(TOKENS[name].model(), keep_ratio=0.5, per_sample=True)
    x = TOKENS[name].images()
    _, expected = step(model, x)
    torchsbp.set_step(model, 0)
    calls = []
    known = queries.kept_query_attention_of
    monkeypatch.setattr(queries, "KEPT_QUERY_ATTENTION", {})
    monkeypatch.setattr(replay, "kept_query_attention_of", lambda *args: calls.append(known(*args)))
    _, found = step(model, x)
    assert calls
    assert_gradients(found, expected)


@pytest.mark.parametrize("recompute", [True, False])
def test_scale_weight_is_the_inverse_ratio(recompute):
    options = {"config": GRID, "keep_ratio": 0.25, "blocks": [1], "recompute": recompute}
    model = torchsbp.apply(TOKENS["eva02, own norm"].model(class_token=False), **options)
    scaled = torchsbp.apply(TOKENS["eva02, own norm"].model(class_token=False), scale="weight", **options)
    x = TOKENS["eva02, own norm"].images()
    (_, a), (_, b) = step(model, x), step(scaled, x)
    for name in a:
        factor = 4 if name.startswith("blocks.1.") else 1
        torch.testing.assert_close(b[name], factor * a[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("name", ["eva02, own norm", "relative, own norm", "mixer"])
def test_autocast_forward_equals_plain_and_gradients_are_as_close(name, recompute):
    plain = TOKENS[name].model().float()
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=1.0, recompute=recompute)
    sampled = torchsbp.apply(copy.deepcopy(plain), keep_ratio=0.5, recompute=recompute)
    x = TOKENS[name].images().float()
    _, exact = step(plain, x)
    with torch.autocast("cpu", torch.bfloat16):
        y, found = step(model, x)
        sampled_y, sampled_found = step(sampled, x)
        expected_y, expected = step(plain, x)
    torch.testing.assert_close(y, expected_y, rtol=0, atol=1e-5 if TOKENS[name].same_bits else 1e-2)
    assert torch.equal(sampled_y, y) or not TOKENS[name].same_bits
    assert sampled_found.keys() == exact.keys()
    assert all(g.dtype == torch.float32 and g.norm() > 0 for g in sampled_found.values())
    assert distance(found, exact) <= 1.5 * distance(expected, exact)


def saved(model: torch.nn.Module, dtype: torch.dtype | None = None) -> int:
    x = TOKENS["eva02, own norm"].images(3).to(next(model.parameters()).dtype)
    with SavedBytes(model, x) as count, torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        model(x)
    return count.total


@pytest.mark.parametrize("name", ["eva02, own norm", "beit, own norm", "parallel", "eva post norm, own norm"])
def test_a_recomputed_block_saves_its_input_alone(name):
    """One more block, sampled or not: B N C numbers more, in bfloat16 under autocast."""
    for blocks in ([0], [0, 1]):
        short, long = (torchsbp.apply(TOKENS[name].model(depth=d), keep_ratio=0.5, blocks=blocks) for d in (2, 3))
        tokens = 3 * (24 + short.num_prefix_tokens) * 24
        assert saved(long) - saved(short) == 8 * tokens
        assert saved(long.float(), torch.bfloat16) - saved(short.float(), torch.bfloat16) == 2 * tokens


@pytest.mark.parametrize("name", ["eva02, own norm", "mixed rope, own norm", "relative, own norm", "parallel"])
def test_copies_train_their_own_weights(name):
    model = torchsbp.apply(TOKENS[name].model(drop_path=0.5), keep_ratio=0.5)
    check_copies(model, TOKENS[name].images())


@pytest.mark.parametrize("name", ["eva02, own norm", "relative, own norm", "mixer"])
def test_eval_no_grad_and_remove_leave_the_model_as_it_was(name):
    plain = TOKENS[name].model(drop_path=0.5)
    check_left_as_it_was(plain, TOKENS[name].images(), keep_ratio=0.5)


@pytest.mark.parametrize("name", ["eva02, own norm", "mixed rope, own norm", "beit, own norm"])
def test_checkpointing_repeats_the_same_masks(name):
    model = torchsbp.apply(TOKENS[name].model(drop_path=0.5), keep_ratio=0.5)
    x = TOKENS[name].images()
    _, expected = step(model, x)
    torchsbp.set_step(model, 0)
    model.set_grad_checkpointing()
    assert_gradients(step(model, x)[1], expected)


def test_frozen_parts_and_two_backward_passes():
    model = torchsbp.apply(TOKENS["eva02, own norm"].model(drop_path=0.5), keep_ratio=0.5)
    x = TOKENS["eva02, own norm"].images()
    _, everything = step(model, x)
    everything = {name: g.clone() for name, g in everything.items()}
    model.zero_grad()
    for i, p in enumerate(model.parameters()):
        p.requires_grad_(i % 3 == 1)
    for _ in range(2):
        torchsbp.set_step(model, 0)
        torch.manual_seed(2)
        y = model(x)
        loss_of(y).backward()
    twice = gradients_of(model)
    assert 0 < len(twice) < len(everything)
    assert_gradients(twice, {name: 2 * everything[name] for name in twice})


def test_parameters_given_by_functional_call_get_the_gradients():
    model = torchsbp.apply(TOKENS["eva02, own norm"].model(), keep_ratio=0.5)
    x = TOKENS["eva02, own norm"].images()
    given = {name: (p.detach() + 0.01).requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, given, x).square().sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01)
    torchsbp.set_step(model, 0)
    model(x).square().sum().backward()
    assert_gradients({n: p.grad for n, p in given.items()}, gradients_of(model))


@pytest.mark.parametrize("name", ["eva02, own norm", "mixed rope, own norm"])
def test_attention_masks_reach_the_mixers(name):
    model, mask = TOKENS[name].model(), torch.ones(25, 25, dtype=torch.bool).tril()
    plain, x = copy.deepcopy(model), TOKENS[name].images()
    torchsbp.apply(model, keep_ratio=0.5)
    model(x, attn_mask=mask).square().sum().backward()
    install_gates(plain, model)
    plain(x, attn_mask=mask).square().sum().backward()
    assert_gradients(gradients_of(model), gradients_of(plain))


@pytest.mark.parametrize("recompute", [True, False])
def test_the_output_bears_in_place_operations(recompute):
    model = torchsbp.apply(TOKENS["eva02, own norm"].model(), keep_ratio=0.5, recompute=recompute)
    x = TOKENS["eva02, own norm"].images()
    _, expected = step(model, x)
    torchsbp.set_step(model, 0)
    model.blocks[1].register_forward_hook(lambda block, args, y: y.mul_(2).div_(2))
    assert_gradients(step(model, x)[1], expected)


def test_dropped_tokens_are_refused():
    model = torchsbp.apply(TOKENS["eva02, own norm"].model(patch_drop_rate=0.5), keep_ratio=0.5)
    with pytest.raises(ValueError, match=r"blocks.1 was given 2 samples of 13 positions.*patch_drop_rate"):
        model(TOKENS["eva02, own norm"].images())


def test_estimate_counts_what_is_saved():
    config = SBPConfig(keep_ratio=0.5)
    model = TOKENS["eva02, own norm"].model().float()
    x = TOKENS["eva02, own norm"].images().float()
    found = torchsbp.estimate(model, x.shape, config, precision="float32", device="cpu")
    torchsbp.apply(model, config=config)
    with SavedBytes(model, x) as expected:
        F.cross_entropy(model(x), torch.zeros(2, dtype=torch.long))
    assert found.saved_bytes == expected.total
    assert set(found.saved) == {"blocks.0", "blocks.1", "blocks.2"}


def test_plan_offers_the_rules_that_the_blocks_have():
    found = torchsbp.plan(TOKENS["eva02, own norm"].model, (2, 3, 32, 48), "1GiB", precision="float32")
    assert found.config == "full"
    rules = {
        c.attention for level in levels(TOKENS["eva02, own norm"].model()) for c in level if isinstance(c, SBPConfig)
    }
    assert rules == {"query"}


COMPILED = [
    ("eva02, own norm", {}),
    ("mixer", {"recompute": False, "per_sample": True}),
    ("one piece", {"scope": "block"}),
]


@pytest.mark.parametrize("name, options", COMPILED, ids=str)
def test_compiled_forward_has_no_second_run(name, options):
    """Full graph, new masks in every step, no recompilation; forward has no more products than plain training."""
    backend, products = counting_backend(PRODUCTS)
    model = TOKENS[name].model(drop_path=0.5, **{"num_blocks" if name == "mixer" else "depth": 2})
    x = TOKENS[name].images()
    with Operators() as plain:
        model(x)
    check_compiled(torchsbp.apply(model, keep_ratio=0.5, **options), x, backend, steps=3)
    assert products == [plain.count(PRODUCTS)]


@pytest.mark.slow
def test_inductor():
    model = torchsbp.apply(TOKENS["mixed rope, own norm"].model(depth=1), keep_ratio=0.5)
    check_compiled(model, TOKENS["mixed rope, own norm"].images(), "inductor", steps=2)

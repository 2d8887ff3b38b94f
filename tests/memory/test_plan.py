"""Plans: sizes, the order of preference, the choice, the largest batch, what does not fit."""

import importlib
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
import torchvision
from torch import nn

import torchsbp
from torchsbp import SBPConfig
from torchsbp.adapters.timm import VIT
from torchsbp.config import PRESETS
from torchsbp.errors import UsageError
from torchsbp.memory.estimate import describe
from torchsbp.memory.plan import SHARES, Candidate, DoesNotFitError, largest_batch, largest_within, levels, options, sbp
from torchsbp.memory.sizes import mib, parse_size
from torchsbp.ops import graphs
from torchsbp.sampling import recommended

from ..models import tiny_convnext, tiny_vit
from ..steps import recommending

SHAPE = (64, 3, 64, 96)
GIB = 2**30

small_vit = partial(tiny_vit, patch_size=8)  # of larger patches its blocks need less memory than the images

pytestmark = pytest.mark.usefixtures("no_graphs")


@pytest.mark.parametrize(
    "text, size",
    [("16GiB", 16 * GIB), ("16 GB", 16 * 10**9), ("8000MiB", 8000 * 2**20), ("1.5gib", 3 * GIB // 2), ("512B", 512),
     ("8G", 8 * GIB), ("8 g", 8 * GIB), ("2000000", 2_000_000), (2**20, 2**20), (1e9, 10**9), (" 2 TiB ", 2 * 2**40)],
)  # fmt: skip
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["16 gigs", "GiB", "", "-3GiB", "16GiB/2", "1e", "inf"])
def test_other_sizes_are_refused(text):
    with pytest.raises(
        ValueError, match=r"size .* is not understood; write a number and a unit, '16GiB'; units: B, KB"
    ):
        parse_size(text)


@pytest.mark.parametrize("number", ["8", 8, "1.5", 1023])
def test_a_small_number_without_a_unit_is_refused(number):
    with pytest.raises(UsageError, match=rf"size '?{number}'? has no unit, .*; did you mean '{number}GiB'\?"):
        parse_size(number)


@pytest.mark.parametrize("memory", ["1B", "900KB", 2**20])
def test_a_plan_in_little_memory_says_what_is_needed(memory):
    """Whatever is left of it without the headroom."""
    with pytest.raises(DoesNotFitError, match=r"does not fit .* the least possible is .* not even a batch of 1 fits"):
        torchsbp.plan(tiny_vit, (2, 3, 64, 96), memory)


def test_a_model_without_blocks_is_told_what_it_needs():
    with pytest.raises(DoesNotFitError, match=r"the least possible is .* with full"):
        torchsbp.plan(nn.Sequential(nn.Flatten(), nn.Linear(12, 4096), nn.Linear(4096, 4096)), (2, 3, 2, 2), "70MiB")


def test_nothing_is_no_size():
    with pytest.raises(ValueError, match="allowed: sizes above 0"):
        parse_size("0GiB")
    with pytest.raises(TypeError, match="a number of bytes or a text such as '16GiB', got None"):
        parse_size(None)
    assert (mib(3 * 2**19), mib(4 * GIB)) == ("1.5 MiB", "4096 MiB")


@pytest.fixture
def untried() -> Iterator[None]:
    """A ViT of which nothing is known: exact gradients come first."""
    with recommending(recommended.UNTRIED, VIT):
        yield


def test_the_order_of_preference(untried):
    """Exact gradients first; then rule "query" at falling ratios, all blocks, rule "qkv". Less recomputation first."""
    assert [describe(level[0]) for level in levels(small_vit())] == [
        "full",
        "exact lean, saved",
        "checkpoint",
        "sbp query r=0.75, saved",
        "sbp query r=0.5, saved",
        "sbp query r=0.25, saved",
        "sbp query r=0.5, all blocks, saved",
        "sbp query r=0.25, all blocks, saved",
        "sbp query r=0.1, all blocks, saved",
        "sbp qkv r=0.25, all blocks, saved",
        "sbp qkv r=0.1, all blocks, saved",
    ]
    assert [config.recompute for config in levels(small_vit())[1]] == [False, 0.25, 0.5, 0.75, True]


@pytest.mark.parametrize(
    "build, its", [(small_vit, recommended.VIT), (tiny_convnext, recommended.CONVNEXT)], ids=["vit", "convnext"]
)
def test_the_evidence_for_a_family_comes_before_what_is_a_judgement(build, its):
    """Its default after plain training, and what it recommends where a step must be shorter before more blocks."""
    order = [level[0] for level in levels(build())]
    default, fast = (SBPConfig(recompute=False, **options) for options in its)
    assert order[:2] == ["full", default]
    assert order.count(default) == order.count(fast) == order.count(SBPConfig(1.0, recompute=False)) == 1
    first = next(i for i, config in enumerate(order) if getattr(config, "blocks", None) == 1)
    assert order.index(fast) <= first
    assert levels(build())[1] == [replace(default, recompute=share) for share in SHARES]


@pytest.mark.parametrize("name", recommended.NAMES)
def test_a_name_is_told_in_numbers(name):
    numbers = SBPConfig(**getattr(recommended.VIT, name))
    its = torchsbp.estimate(small_vit, SHAPE, SBPConfig(name))
    assert its == torchsbp.estimate(small_vit, SHAPE, numbers)
    assert its.config == describe(numbers) == describe(SBPConfig(name), small_vit())
    assert describe(SBPConfig(name)) == f"sbp query r={name}, recomputed"  # of no model
    found = torchsbp.plan(small_vit, SHAPE, "8GiB", configs=[SBPConfig(name)])
    assert found.config == numbers
    given = ", ".join(f"{option}={value!r}" for option, value in getattr(recommended.VIT, name).items())
    assert str(found).splitlines()[-1] == f"torchsbp.apply(model, {given})"


CHANGED = {
    "keep_ratio": 0.25, "sampler": "grid", "attention": "qkv", "blocks": [1, 2], "scope": "block",
    "per_sample": True, "per_block": False, "exact_downsampling": False, "scale": "weight", "recompute": 0.5, "seed": 7,
    "capture": False,
}  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in fields(SBPConfig)])
@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_a_described_configuration_hides_nothing_that_differs(field, ratio):
    value = CHANGED[field]
    text = describe(SBPConfig(**{"keep_ratio": ratio} | {field: value}))
    assert text != describe(SBPConfig(keep_ratio=ratio))
    assert (f"{value:.0%}" if field == "recompute" else str(value)) in text


@pytest.mark.parametrize(
    "given",
    [{}, {"scope": "block"}, {"attention": "head"}, {"scale": "none", "per_block": False}, PRESETS["paper"]],
    ids=str,
)
def test_the_options_of_a_plan_make_its_configuration(given):
    config = SBPConfig(**given)
    assert SBPConfig(**options(config)) == config
    assert options(config).keys() <= {"keep_ratio", *given}


def test_a_sampler_of_your_own_is_described_by_its_name():
    def mine(*_):
        raise NotImplementedError

    assert describe(SBPConfig(0.5, sampler=mine, blocks=1)) == "sbp query r=0.5, all blocks, recomputed, sampler=mine"


def test_the_order_for_models_without_attention_and_without_sbp():
    assert [describe(level[-1]) for level in levels(tiny_convnext())][-1] == "sbp query r=0.1, all blocks, recomputed"
    assert levels(timm.create_model("resnet18")) == [["full"], ["checkpoint"]]
    assert levels(small_vit(proj_drop_rate=0.5)) == [["full"], ["checkpoint"]]  # inner dropout is not supported


@pytest.fixture(scope="module")
def peaks() -> dict[str, tuple]:
    """Of a tiny ViT: configuration in words -> (configuration, peak)."""
    configs = ["full", *sbp(keep_ratio=1.0), "checkpoint", SBPConfig(0.5, recompute=False)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "LARGEST", 0)
        return {describe(c): (c, torchsbp.estimate(small_vit, SHAPE, c).peak) for c in configs}


@pytest.mark.parametrize(
    "budget, chosen",
    [
        ("full", "full"),
        ("exact lean, saved", "exact lean, saved"),
        ("exact lean, 50% recomputed", "exact lean, 50% recomputed"),
        ("exact lean, recomputed", "exact lean, recomputed"),
    ],
)
def test_the_first_that_fits_is_chosen(untried, peaks, budget, chosen):
    """With exactly the memory of a configuration, and nothing better that needs as little."""
    found = torchsbp.plan(small_vit, SHAPE, peaks[budget][1], headroom=0)
    assert describe(found.config) == chosen
    assert found.estimate.peak == peaks[chosen][1] == found.usable
    names = [describe(candidate.config) for candidate in found.tried]
    before = found.tried[: names.index(chosen)]
    assert before == [c for c in found.tried if not c.fits]
    assert f"{chosen}" in str(found)
    assert "← chosen" in str(found)


def test_sampling_comes_when_nothing_exact_fits(untried, peaks):
    exact = min(peak for name, (_, peak) in peaks.items() if not name.startswith("sbp"))
    found = torchsbp.plan(small_vit, SHAPE, exact - 1, headroom=0)
    assert found.config.keep_ratio < 1
    assert found.config.attention == "query"
    assert found.estimate.peak < exact
    assert f"torchsbp.apply(model, keep_ratio={found.config.keep_ratio}" in str(found)


def test_headroom_is_left(peaks):
    found = torchsbp.plan(small_vit, SHAPE, int(peaks["full"][1] * 1.01), headroom=0.02)
    assert describe(found.config) != "full"
    assert found.usable == int(found.memory * 0.98)
    with pytest.raises(ValueError, match=r"headroom=1 is not allowed; allowed: a number in \[0, 1\)"):
        torchsbp.plan(small_vit, SHAPE, "1GiB", headroom=1)


def test_own_configurations_replace_the_order(peaks):
    wanted = SBPConfig(keep_ratio=0.25)
    found = torchsbp.plan(small_vit, SHAPE, "1GiB", configs=[wanted, "full"])
    assert found.config == wanted
    assert [candidate.config for candidate in found.tried] == [wanted]


def test_what_does_not_fit_says_what_the_least_is(peaks):
    with pytest.raises(DoesNotFitError, match=r"does not fit in 70.0 MiB \(63.0 MiB without the headroom\)") as error:
        torchsbp.plan(small_vit, SHAPE, "70MiB")
    least = min(error.value.tried, key=lambda candidate: candidate.peak)
    assert f"the least possible is {mib(least.peak)}, with {describe(least.config)}" in str(error.value)
    assert "not even a batch of 1 fits" in str(error.value)
    with pytest.raises(DoesNotFitError, match=r"the largest batch with that is [1-9]\d*$"):
        torchsbp.plan(small_vit, SHAPE, "75MiB", configs=["full"], headroom=0)


def test_the_largest_batch_fits_and_the_next_does_not():
    config, memory = SBPConfig(keep_ratio=0.5), 200 * 2**20
    batch = largest_batch(small_vit, SHAPE, memory, config)
    peaks = [torchsbp.estimate(small_vit, (b, *SHAPE[1:]), config).peak for b in (batch, batch + 1)]
    assert peaks[0] <= memory < peaks[1]
    assert torchsbp.plan(small_vit, SHAPE, memory, configs=[config], headroom=0).largest_batch == batch


@pytest.mark.parametrize(
    "peak, largest",
    [
        (lambda n: 10 * n, 100),
        (lambda n: 500 + n, 500),
        (lambda n: 2000 + n, 0),
        (lambda n: max(3 * n, 500 + n), 333),
        (lambda n: 7 * n - n % 5, 143),
    ],
)
def test_the_search_takes_few_steps(peak, largest):
    asked = []
    assert largest_within(lambda n: asked.append(n) or peak(n), 1000, 8) == largest
    assert len(asked) <= 20
    assert len(set(asked)) == len(asked)


def test_a_plan_can_be_written_down():
    found = torchsbp.plan(nn_chain, (8, 16), "1GiB").to_dict()
    assert found["config"] == "full"
    assert found["tried"] == [{"config": "full", "peak": found["estimate"]["peak"], "fits": True}]
    assert found["options"] == {}


def detector() -> nn.Module:
    return torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)


def test_a_plan_for_a_part_of_the_model_says_so_and_names_no_batch():
    shape = (1, 3, 128, 128)
    found = torchsbp.plan(detector, shape, "8GiB")
    assert (found.covers, found.largest_batch) == ("backbone", None)
    assert [candidate.fits for candidate in found.tried] == [None]
    text = str(found)
    assert "or more: not known whether it fits" in text
    assert "Only backbone is covered: what follows it depends on data and needs memory too." in text
    assert "MiB  fits" not in text
    assert "largest batch with it" not in text
    written = found.to_dict()
    assert (written["covers"], written["largest_batch"], written["tried"][0]["fits"]) == ("backbone", None, None)
    with pytest.raises(DoesNotFitError, match=r"that is backbone alone: the rest of the model comes on top$") as error:
        torchsbp.plan(detector, shape, "64MiB", configs=["full"])
    assert [candidate.fits for candidate in error.value.tried] == [False]
    with pytest.raises(UsageError, match="only backbone of the model can be estimated: its largest batch is not known"):
        largest_batch(detector, shape, 8 * 2**30)


def nn_chain() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def test_models_on_the_meta_device_are_planned():
    with torch.device("meta"):
        model = small_vit()
    assert torchsbp.plan(model, SHAPE, "1GiB").config == "full"


def test_the_benchmark_compares_what_the_issue_asks_for(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    bench = importlib.import_module("memory")
    args = SimpleNamespace(models=list(bench.BATCHES), batch=None, device="cpu", memory=["8GiB", "1GiB"], batches=[256])
    args.parts = ["peak", "plan"]
    *jobs, fits, nothing = bench.jobs(args)
    assert {job.model for job in jobs} == set(bench.BATCHES)
    assert all(sum(job.model == model for job in jobs) == 5 for model in bench.BATCHES)
    lean = [SBPConfig(keep_ratio=1.0, recompute=share) for share in (0.5, 0.75)]

    def plan(build, shape, memory, precision):
        if memory == "1GiB":
            raise DoesNotFitError("does not fit", [Candidate("full", 9, False), Candidate("checkpoint", 5, False)])
        return SimpleNamespace(config=lean[1], tried=[Candidate(c, 0, True) for c in lean], largest_batch=300)

    monkeypatch.setattr(bench, "plan", plan)
    named = SimpleNamespace(build=None)
    (chosen, row), (before, row_before) = fits.planned(named, (256, 3, 224, 224))
    assert (row["memory"], row["role"], row_before["role"]) == ("8GiB", "chosen", "before")
    assert (describe(chosen), describe(before)) == ("exact lean, 75% recomputed", "exact lean, 50% recomputed")
    ((least, row),) = nothing.planned(named, (256, 3, 224, 224))
    assert (least, row["role"], row["refusal"]) == ("checkpoint", "least", "does not fit")
    row = {**jobs[0].names, "method": "full", "predicted MiB": 90.0, "peak MiB": 100.0, "error of prediction": -0.1}
    assert bench.markdown([row]).endswith("| vit_tiny_patch16_224, 256 | full | 90 MiB | 100 MiB | -10.0% |")
    assert "predicted       90 MiB  measured      100 MiB   -10.0%" in bench.show(row)

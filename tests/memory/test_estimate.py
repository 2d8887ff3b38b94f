"""Predicted memory: against counted bytes on CPU, against peaks measured on a GPU, and by formula."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import torchsbp
from torchsbp import SBPConfig
from torchsbp.memory import simulated
from torchsbp.memory.saved import Saved
from torchsbp.ops import graphs
from torchsbp.ops.device import CPU_DEVICE, device_of
from torchsbp.ops.downsample import DownsampleParams, DownsampleSpec, downsample
from torchsbp.ops.layers import BackwardOptions

from ..counting import SavedBytes
from ..models import LEAN, images
from ..steps import GRID

MIB = 2**20
SHAPE = (3, 3, 64, 96)
CONFIGS = {
    "full": "full",
    "query": SBPConfig(keep_ratio=0.5),
    "query, saved": SBPConfig(keep_ratio=0.25, recompute=False),
    "qkv": SBPConfig(keep_ratio=0.25, attention="qkv", recompute=0.5),
    "head": SBPConfig(keep_ratio=0.5, attention="head"),
}
CASES = [("vit", config) for config in CONFIGS] + [
    (name, config) for name in LEAN if name != "vit" for config in ("full", "query, saved")
]


def vit(**options) -> nn.Module:
    return timm.create_model("vit_base_patch16_224", **options)


def counted(model: nn.Module, x: torch.Tensor, half: bool = False) -> int:
    """Saved bytes of a real step."""
    with torch.autocast("cpu", torch.bfloat16, enabled=half), SavedBytes(model, x) as saved:
        output = model(x)
        F.cross_entropy(output.float() if half else output, torch.zeros(len(x), dtype=torch.long))
    return saved.total


@pytest.mark.parametrize("family, config", CASES)
def test_saved_bytes_are_those_counted_on_cpu(family, config):
    model, config = LEAN[family].model().float(), CONFIGS[config]
    predicted = torchsbp.estimate(model, SHAPE, config, "float32", device="cpu")
    if config != "full":
        torchsbp.apply(model, config=config)
    assert predicted.saved_bytes == pytest.approx(counted(model, images().float()), rel=0.01)


@pytest.mark.parametrize("family, options", [("vit", {}), ("convnext", {"dims": (48, 64, 80, 96)})])
def test_saved_bytes_are_those_counted_under_autocast(family, options):
    model = LEAN[family].model(**options).float()
    for config in ("full", SBPConfig(keep_ratio=0.5)):
        predicted = torchsbp.estimate(model, SHAPE, config, "bf16", device="cpu")
        if config != "full":
            torchsbp.apply(model, config=config)
        assert predicted.saved_bytes == pytest.approx(counted(model, images().float(), half=True), rel=0.01)


# One H200, torch 2.11, eager, bf16, AdamW, 224², batch 256: max_memory_allocated, MiB.
MEASURED = json.loads((Path(__file__).parents[2] / "benchmarks/results/memory.json").read_text())["rows"]
QUARTER = replace(GRID, keep_ratio=0.25)  # the default, when it was measured


@pytest.mark.parametrize(
    "model, method, config",
    [
        ("vit_base_patch16_224", "full", "full"),
        ("vit_base_patch16_224", "sbp query r=0.25, recomputed", QUARTER),
        ("vit_base_patch16_224", "sbp query r=0.25, saved", replace(QUARTER, recompute=False)),
        ("convnext_tiny", "full", "full"),  # sampled, these two were measured when other things were saved
        ("swin_tiny_patch4_window7_224", "full", "full"),
    ],
    ids=str,
)
def test_predicted_as_measured_on_a_gpu(model, method, config):
    (row,) = (r for r in MEASURED if (r["part"], r["model"], r["method"]) == ("peak", model, method))
    order = channels_last if "convnext" in model else nn.Identity()
    predicted = torchsbp.estimate(lambda: order(timm.create_model(model)), (row["batch"], 3, 224, 224), config)
    assert predicted.peak == pytest.approx(row["peak MiB"] * MIB, rel=0.03)
    if "saved MiB" in row:
        saved = row["saved MiB"] * MIB - (0 if config == "full" else saved_by_patches(row["batch"]))
        assert predicted.saved_bytes == pytest.approx(saved, rel=0.01)


def saved_by_patches(batch: int) -> int:
    """What a patched model's patch embedding saved besides when it was measured: images and weight in bf16."""
    return 2 * (batch * 3 * 224 * 224 + 768 * 3 * 16 * 16)


def channels_last(model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.channels_last)


def test_what_is_alive_sums_up_to_the_peak():
    found = torchsbp.estimate(LEAN["vit"].model().float(), SHAPE, SBPConfig(keep_ratio=0.5))
    assert sum(at_peak for _, _, at_peak in found.rows()) == found.peak
    assert found.saved_bytes == sum(found.saved.values()) + found.saved_elsewhere
    assert {name: sum(parts.values()) for name, parts in found.parts.items()} == found.saved


@pytest.mark.parametrize("family", ["vit", "convnext"])
def test_graphs_hold_what_one_pass_needs(family, monkeypatch):
    """Its inputs' copies and what it makes, the most of all passes; the rest of a step needs less for it. Masks are
    drawn by a graph with memory of its own."""
    model, config = LEAN[family].model().float(), SBPConfig(keep_ratio=0.5)
    with_graphs = torchsbp.estimate(model, SHAPE, config)
    not_captured = torchsbp.estimate(model, SHAPE, replace(config, capture=False))
    monkeypatch.setattr(graphs, "LARGEST", 0)
    without = torchsbp.estimate(model, SHAPE, config)
    assert not_captured.graphs == 0
    assert 0 < without.graphs < 2**18
    assert with_graphs.graphs > simulated.CUBLAS // 2
    assert with_graphs.peak - with_graphs.graphs < without.peak - without.graphs
    assert not_captured.peak == without.peak - without.graphs
    assert torchsbp.estimate(model, SHAPE, "full").graphs == 0


def test_the_graph_that_draws_masks_holds_at_least_the_masks():
    """The kept rows of every block, 8 bytes each."""
    model = timm.create_model("vit_tiny_patch16_224", depth=4, num_classes=5)
    found = torchsbp.estimate(model, (512, 3, 224, 224), SBPConfig(keep_ratio=0.5, blocks=1.0))
    assert found.graphs > 4 * 8 * 512 * 98


def test_parameters_gradients_and_optimizer_state():
    model = LEAN["vit"].model().float()
    total = sum(p.nbytes for p in model.parameters())
    by_optimizer = {name: torchsbp.estimate(model, SHAPE, optimizer=name) for name in ("adamw", "momentum", "sgd")}
    assert [e.optimizer for e in by_optimizer.values()] == [2 * total, total, 0]
    assert by_optimizer["adamw"].parameters == total == by_optimizer["adamw"].gradients
    assert by_optimizer["adamw"].peak - by_optimizer["sgd"].peak == 2 * total
    model.blocks.requires_grad_(False)
    frozen = sum(p.nbytes for p in model.blocks.parameters())
    assert torchsbp.estimate(model, SHAPE).gradients == total - frozen


def test_the_model_is_not_changed():
    model = torchsbp.apply(LEAN["vit"].model(), keep_ratio=0.5)
    model(images())
    kept, before = torchsbp.kept(model), {name: id(p) for name, p in model.named_parameters()}
    values = {name: t.clone() for name, t in model.state_dict().items()}
    for config in (None, "full", "checkpoint", SBPConfig(keep_ratio=0.25)):
        torchsbp.estimate(model, SHAPE, config)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert all(torch.equal(t, values[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(rows, kept[name]) for name, rows in torchsbp.kept(model).items())
    assert "forward" not in vars(model.blocks[0])


def test_a_real_model_a_meta_model_and_a_function_give_the_same():
    build = LEAN["vit"].build
    with torch.device("meta"):
        meta = build()
    found = [
        torchsbp.estimate(model, SHAPE, SBPConfig(keep_ratio=0.5)) for model in (build(), build().eval(), meta, build)
    ]
    assert found[0] == found[1] == found[2] == found[3]


def test_a_patched_model_is_taken_as_it_is(no_graphs):
    model, config = LEAN["convnext"].model(), SBPConfig(keep_ratio=0.25)
    expected = torchsbp.estimate(model, SHAPE, config)
    torchsbp.apply(model, config=config)
    assert torchsbp.estimate(model, SHAPE).peak == expected.peak
    assert torchsbp.estimate(model, SHAPE, "full").peak > expected.peak


def test_everything_of_pytorch_is_itself_again():
    functions = [F.scaled_dot_product_attention, F.dropout, F.layer_norm, torch.softmax]
    with pytest.raises(ValueError, match="refuses"):
        torchsbp.estimate(vit, (2, 3, 32, 32))
    assert functions == [F.scaled_dot_product_attention, F.dropout, F.layer_norm, torch.softmax]
    assert "softmax" not in vars(torch.Tensor)
    assert torch._C._len_torch_function_stack() == 0
    assert device_of(torch.empty(1)) is CPU_DEVICE


class ConvThenNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 8, 1), nn.LayerNorm(16), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.conv(x))).flatten(1)


def test_a_gpu_is_predicted_where_it_differs_from_the_cpu():
    """Norms are float32 under CUDA's autocast; a dropout mask has one byte per element."""
    model, n = ConvThenNorm(), 4 * 8 * 16 * 16
    parts = {device: torchsbp.estimate(model, (4, 3, 16, 16), device=device) for device in ("cuda", "cpu")}
    inputs = 2 * 4 * 3 * 16 * 16 + 2 * 8 * 3  # image and weight in bf16
    norm = 4 * (n + 2 * 4 * 8 * 16)  # its input and statistics
    loss = 4 * n + 8 * 4 + 4  # log-softmax, labels, their number
    assert parts["cuda"].saved_bytes == inputs + norm + n + loss
    assert parts["cpu"].saved_bytes != parts["cuda"].saved_bytes


def test_a_detector_is_covered_up_to_its_backbone():
    def build() -> nn.Module:
        return torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)

    found = torchsbp.estimate(build, (1, 3, 128, 128))
    assert found.covers == "backbone"
    assert "activations of backbone alone" in str(found)
    assert found.parameters > sum(p.nbytes for p in build().backbone.parameters())


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.pick = nn.Linear(4, 4), Picks()

    def forward(self, x):
        return self.pick(self.first(x))


class Picks(nn.Module):
    def forward(self, x):
        return x[x.sum(1) > 0]


@pytest.mark.parametrize(
    "names", [("bf16", "bfloat16", torch.bfloat16), ("fp16", "float16"), ("float32", "fp32", torch.float32)], ids=str
)
def test_precisions_have_several_names(names):
    found = [torchsbp.estimate(nn.Linear(4, 4), (2, 4), precision=name) for name in names]
    assert {its.precision for its in found} == {names[0]}
    assert len({its.peak for its in found}) == 1


def test_what_depends_on_data_is_named():
    with pytest.raises(ValueError, match=r"pick does what depends on data .* estimate\(model\.<part>, …\)"):
        torchsbp.estimate(Counts(), (2, 4))


@pytest.mark.parametrize(
    "arguments, error",
    [
        (
            {"input_shape": (2, 3, 100, 100)},
            r"refuses an input of shape \[2, 3, 100, 100\] \(in patch_embed\): Input height",
        ),
        ({"input_shape": (0, 3, 224, 224)}, r"input_shape=\(0, 3, 224, 224\) is not allowed"),
        ({"precision": "int8"}, "precision='int8' is not allowed; allowed: 'bf16', 'fp16', 'float32', 'bfloat16'"),
        ({"optimizer": "best"}, "optimizer='best' is not allowed; allowed: 'adamw'"),
        ({"config": "sbp"}, "config='sbp' is not allowed; allowed: 'full', 'checkpoint'"),
        ({"device": "tpu"}, "device='tpu' is not allowed; allowed: 'cuda', 'cpu'"),
        ({"model": 3}, "model must be a torch.nn.Module or a function"),
        ({"model": nn.Linear(2, 2), "input_shape": (2, 2), "config": "checkpoint"}, "Linear has no chain of blocks"),
    ],
)
def test_errors_say_what_is_wrong(arguments, error):
    with pytest.raises((ValueError, TypeError), match=error):
        torchsbp.estimate(**{"model": vit, "input_shape": (2, 3, 224, 224)} | arguments)


def test_vit_base_takes_seconds():
    start = time.perf_counter()
    torchsbp.estimate(vit, (64, 3, 224, 224), SBPConfig(keep_ratio=0.5))
    assert time.perf_counter() - start < 20  # 1 to 2 s on two idle cores


# What docs/memory.md says a block saves, bytes per sample: N rows of which k are kept, C channels, H heads, F hidden.
FORMULAS = {
    "query": lambda N, k, C, H, F: 2 * N * C + 2 * k * C + 4 * k * H,
    "query, saved": lambda N, k, C, H, F: 4 * N * C + 2 * k * C + 4 * k * H + 6 * N * C + 2 * k * C + 2 * k * F,
    "qkv": lambda N, k, C, H, F: 2 * k * C + 2 * k * C + 4 * k * H,
    "qkv, saved": lambda N, k, C, H, F: 4 * k * C + 2 * k * C + 4 * k * H + 6 * k * C + 2 * k * F,
    "exact": lambda N, k, C, H, F: 2 * N * C + 2 * N * C + 4 * N * H,
    "exact, saved": lambda N, k, C, H, F: 4 * N * C + 2 * N * C + 4 * N * H + 6 * N * C + 2 * N * F,
    "full": lambda N, k, C, H, F: 20 * N * C + 4 * N * H + 4 * N * F + 16 * N,
    "checkpoint": lambda N, k, C, H, F: 4 * N * C,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_the_formulas_of_a_transformer_block(name, no_graphs):
    batch, sizes = 16, {"N": 197, "k": 99, "C": 192, "H": 3, "F": 768}
    rule, _, saved = name.partition(", ")
    options = {"keep_ratio": 1.0 if rule == "exact" else 0.5, "recompute": not saved, "blocks": [-2, -1]}
    options |= {"attention": rule} if rule in ("query", "qkv") else {}
    config = rule if rule in ("full", "checkpoint") else SBPConfig(**options)
    found = torchsbp.estimate(lambda: timm.create_model("vit_tiny_patch16_224", depth=4), (batch, 3, 224, 224), config)
    once = 24 * sizes["C"] ** 2 + 16 if name == "full" else 0  # weights in bf16, a seed
    indices = rows_and_inverse(sizes["N"], sizes["k"]) if rule in ("query", "qkv") else 0
    assert found.saved["blocks.3"] == batch * (FORMULAS[name](**sizes) + indices) + once


def rows_and_inverse(N: int, k: int) -> int:
    """What the mask of a block takes."""
    return 8 * k + 4 * N


@pytest.mark.parametrize("name", ["full", "sbp", "sbp, saved"])
def test_the_formulas_of_a_convnext_block(name):
    """Bytes per sample of N rows, of which k are kept, and the weights in bf16 that autocast makes."""
    batch, N, k, C, F = 16, 56 * 56, 56 * 56 // 4, 96, 384
    pointwise, depthwise = 4 * C * F, 2 * 49 * C
    formula, weights = {
        "full": (10 * N * C + 8 * N + 4 * N * F, pointwise + depthwise),
        "sbp": (2 * N * C + 2 * k * C + rows_and_inverse(N, k), depthwise),
        "sbp, saved": (2 * N * C + 2 * k * C + 2 * k * F + rows_and_inverse(N, k), depthwise),
    }[name]
    config = "full" if name == "full" else SBPConfig(keep_ratio=0.25, recompute="saved" not in name)
    found = torchsbp.estimate(lambda: channels_last(timm.create_model("convnext_tiny")), (batch, 3, 224, 224), config)
    assert found.saved["stages.0.blocks.1"] == batch * formula + weights


def test_the_formula_of_a_down_sampling_layer():
    """Patches of 2×2 rows of k kept outputs, before the norm, and k indices."""
    x, rows, C = torch.randn(2, 8, 6, 6), torch.tensor([0, 4, 10]), 8
    params = DownsampleParams(torch.ones(C), torch.zeros(C), torch.randn(4, C, 2, 2, requires_grad=True), None)
    model = nn.ParameterList([p for p in params if p is not None])
    with SavedBytes(model, *[p for p in params if p is not None]) as saved:
        downsample(x, rows, params, DownsampleSpec((2, 2)))
    assert saved.total == 4 * 4 * len(rows) * C + 8 * len(rows)


@pytest.mark.parametrize("recompute, size", [(True, 2), (False, 4)])
def test_a_down_sampling_layer_rounds_what_it_saves_where_memory_comes_first(recompute, size):
    x, rows, C = torch.randn(2, 8, 6, 6), torch.tensor([0, 4, 10]), 8
    params = DownsampleParams(torch.ones(C), torch.zeros(C), torch.randn(4, C, 2, 2, requires_grad=True), None)
    model = nn.ParameterList([p for p in params if p is not None])
    with torch.autocast("cpu", torch.bfloat16), SavedBytes(model, *[p for p in params if p is not None]) as saved:
        downsample(x, rows, params, DownsampleSpec((2, 2)), BackwardOptions(recompute=recompute))
    assert saved.total == size * 4 * len(rows) * C + 8 * len(rows)


def test_saved_bytes_count_a_storage_once_and_no_parameters():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    floats = 3 * 4 + 3 * 8  # the input, and tanh's output, which two layers save
    with Saved(model) as saved:
        y = model(torch.randn(3, 4))
    y.sum().backward()
    assert saved.total == 4 * floats
    assert torch.isfinite(model[0].weight.grad).all()

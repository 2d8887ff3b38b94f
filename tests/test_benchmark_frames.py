"""The benchmark over the number of frames: every method steps, and its tables say what was measured."""

import importlib
from pathlib import Path

import pytest
import torch


@pytest.fixture
def frames(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("frames")


def test_every_method_steps_and_changes_what_it_trains(frames, monkeypatch):
    small = frames.Temporal(width=32, heads=2, feedforward=32)
    monkeypatch.setattr(frames, "Temporal", lambda: small)
    for method in frames.METHODS:
        setting = frames.Setting(method, "eager", (10,), 1, 32, "cpu", 4, "resnet18", bf16=False, warmup=0, steps=1)
        case = frames.Case(setting, 10)
        before = {name: its.detach().clone() for name, its in case.model.named_parameters()}
        assert frames.measured(case)["step ms"] > 0
        changed = {name for name, its in case.model.named_parameters() if not torch.equal(its, before[name])}
        assert ("encoder.body.conv1.weight" in changed) == (method != "frozen encoder")
        assert "temporal.classifier.weight" in changed


def rows() -> list[dict]:
    full = [
        {"mode": "eager", "method": "full", "frames": count, "peak MiB": 200.0 * count, "step ms": 1.0 * count}
        for count in (128, 160)
    ]
    sampled = [
        {"mode": "eager", "method": "sbp r=1/5", "frames": count, "peak MiB": 50.0 * count, "step ms": 0.5 * count}
        for count in (160, 512)
    ]
    return [*full, {"mode": "eager", "method": "full", "frames": 512, "error": "out of memory"}, *sampled]


def test_tables_and_floors(frames):
    measured = rows()
    frames.add_ratios(measured)
    assert frames.markdown(measured).splitlines() == [
        "| eager | 128 frames | 160 frames | 512 frames |",
        "|---|---|---|---|",
        "| full | 25.0 GiB, 128 ms | 31.2 GiB, 160 ms | out of memory |",
        "| sbp r=1/5 | – | 7.8 GiB, 80 ms (0.25×, 2.00×) | 25.0 GiB, 256 ms |",
    ]
    assert frames.floors(measured) == [
        "ok: eager, 160 frames: 0.250×, 2.00×",
        "ok: 512 frames at r=1/5 25600 MiB, 128 frames in full 25600 MiB",
    ]
    measured[-2]["memory"] = 0.3
    assert frames.floors(measured)[0].startswith("NOT: eager, 160 frames: 0.300×")

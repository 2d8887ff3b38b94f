"""Paired runs: their order, how many at once, what is told of them; and the swings and images that they are run on."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, features

from torchsbp.study.data import read
from torchsbp.train.data.images import Folder
from torchsbp.train.data.lists import Listed
from torchsbp.train.data.thumos import Thumos

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NEEDED = ("paired_runs", "golf_data", "imagenette_data")


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in NEEDED})


def record(folder: Path, value: float, ended: bool = True) -> None:
    folder.mkdir()
    lines = [
        {"kind": "train", "step": 1, "memory_mib": 100, "epoch": 3.0},
        {"kind": "valid", "step": 1, "box_ap": value, "epoch": 3.0},
        *([{"kind": "end", "step": 1}] if ended else []),
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_paired_differences_have_an_interval(bench, tmp_path):
    values = {"full": [50.0, 52, 54], "sbp": [49.0, 51.5, 54.5]}
    for arm, found in values.items():
        for seed, value in enumerate(found):
            record(tmp_path / f"{arm}_{seed}", value)
    record(tmp_path / "sbp_3", 10.0, ended=False)
    table = bench.paired_runs.table(tmp_path, ["box_ap"]).splitlines()
    assert table[2] == "| full | 3 | 3 | 52.00 ± 4.97 | 100 |"
    assert table[3] == "| sbp | 3 | 3 | 51.67 ± 6.84, Δ -0.33 ± 1.90 | 100 |"
    assert len(table) == 4


def test_runs_that_all_failed_are_told(bench, tmp_path):
    assert "no run in" in bench.paired_runs.table(tmp_path, ["box_ap"])


def test_every_arm_has_its_first_seed_first_and_late_ones_are_stopped(bench, monkeypatch, tmp_path, capsys):
    alive: list[subprocess.Popen[bytes]] = []
    begun = []

    def started(recipe, arm, seed, out, common):
        begun.append((arm, seed, sum(process.poll() is None for process in alive)))
        seconds = 60 if (arm, seed) == ("b", 1) else 0
        alive.append(subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"]))
        return alive[-1]

    monkeypatch.setattr(bench.paired_runs, "started", started)
    monkeypatch.setattr(bench.paired_runs, "shared_gpu", lambda: None)
    bench.paired_runs.main(f"recipe --out {tmp_path} --arm a --arm b --seeds 2 --jobs 2 --limit 5".split())
    assert [its[:2] for its in begun] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert max(beside for _, _, beside in begun) == 1
    assert all(process.poll() is not None for process in alive)
    assert "3 of 4 runs ended well" in capsys.readouterr().out


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")
def test_golf_swings_become_what_the_tasks_read(bench, tmp_path):
    events = np.array([[2, 5, 6, 8, 9, 11, 12, 17], [1, 3, 5, 7, 9, 11, 13, 15], [0, 1, 2, 3, 4, 5, 6, 19]])
    frames, packed, edges = 20, b"", [0]
    for number in range(len(events)):
        pictures = [Image.new("RGB", (16, 16), (10 * frame, 50 * number, 100)) for frame in range(frames)]
        pictures[0].save(tmp_path / "one.avif", save_all=True, append_images=pictures[1:], quality=100)
        packed += (tmp_path / "one.avif").read_bytes()
        edges.append(len(packed))
    phase = (np.arange(frames) >= events[..., None]).sum(1)
    blob = np.frombuffer(packed, np.uint8)
    np.savez(
        tmp_path / "golf.npz", blob=blob, off=np.array(edges), events=events, phase=phase, split=np.array([2, 1, 2])
    )
    bench.golf_data.main([str(tmp_path / "golf.npz"), str(tmp_path)])
    for part, numbers in {"train": [0, 2], "test": [1]}.items():
        swings, phases = Thumos(tmp_path / "swings", part, 30.0), Listed(tmp_path / "phases", f"{part}.txt")
        assert torch.cat([swings.targets(video).argmax(1) for video in range(len(numbers))]).tolist() == [
            label for number in numbers for label in phase[number]
        ]
        assert list(phases.labels) == [(label,) for _ in numbers for label in range(7)]
        clip, swing = phases.open(3), swings.read(0, range(frames))
        begin, end = list(pairwise(events[numbers[0]]))[3]
        evenly = np.linspace(begin, end, 16).round().astype(int)
        assert torch.equal(clip.read(range(16)), swing[evenly].permute(0, 2, 3, 1))
        stills = Folder(tmp_path / "stills" / part, "RGB")
        assert len(stills) == 7 * len(numbers)
        still = Image.open(stills.root / "mid-downswing" / f"swing{numbers[0]:03}_09.ppm")
        assert np.array_equal(np.asarray(still), swing[9].permute(1, 2, 0))


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")
def test_packed_images_become_folders_of_classes(bench, tmp_path):
    size, about = 16, {"tile": 16, "per_mosaic": 4, "classes": ["gas pump", "church"]}
    labels, packed = {"train": np.array([1, 0, 0, 1, 0, 1]), "val": np.array([0, 1])}, {}
    for part, its in labels.items():
        blob, edges = b"", [0]
        for begin in range(0, len(its), 4):
            few = its[begin : begin + 4]
            grey = np.repeat(100 * few + 10 * (np.arange(len(few)) + begin), size * size).astype(np.uint8)
            picture = grey.reshape(-1, 2, size, size).swapaxes(1, 2).reshape(-1, 2 * size)
            Image.fromarray(picture).convert("RGB").save(tmp_path / "one.avif", quality=100)
            blob += (tmp_path / "one.avif").read_bytes()
            edges.append(len(blob))
        packed |= {f"{part}_blob": np.frombuffer(blob, np.uint8), f"{part}_off": np.array(edges), f"{part}_y": its}
    np.savez(tmp_path / "images.npz", meta=json.dumps(about), **packed)
    bench.imagenette_data.main([str(tmp_path / "images.npz"), str(tmp_path)])
    for part, its in labels.items():
        images = Folder(tmp_path / part, "L")
        assert images.names == ["church", "gas_pump"]
        wanted = [[100 * label + 10 * number for number, label in enumerate(its) if label == one] for one in (1, 0)]
        found = [np.asarray(image) for image, _ in map(images.__getitem__, range(len(images)))]
        assert [image.mean().round() for image in found] == [value for values in wanted for value in values]
        assert {image.shape for image in found} == {(size, size)}
    bench.imagenette_data.main([str(tmp_path / "images.npz"), str(tmp_path / "few"), "--pictures", "1"])
    assert len(Folder(tmp_path / "few" / "train", "L")) == 4
    bench.imagenette_data.main([str(tmp_path / "images.npz"), str(tmp_path / "arrays.npz")])
    x_train, y_train, x_test, y_test = read(tmp_path / "arrays.npz")
    assert (x_train.shape, x_test.shape) == ((6, size, size, 3), (2, size, size, 3))
    assert (y_train.tolist(), y_test.tolist()) == tuple(its.tolist() for its in labels.values())
    assert x_train.float().mean((1, 2, 3)).round().tolist() == (100 * labels["train"] + 10 * np.arange(6)).tolist()

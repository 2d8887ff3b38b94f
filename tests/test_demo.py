"""The demo on fewer images: its table, its picture, and the same result for the same seed."""

import importlib
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch

from torchsbp.train.data import images as sources

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS, IMAGES = 6, 192  # 6 steps of 32 images

Results = list[dict]


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        whole = sources.digits

        def few(train: bool, mode: str) -> sources.Arrays:
            images = whole(train, mode)
            return sources.Arrays("digits", images.images[:IMAGES], images.labels[:IMAGES], 10, mode)

        patch.setattr(sources, "digits", few)
        yield importlib.import_module("demo")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def run(demo: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], tuple[Path, Results]]:
    def run_demo() -> tuple[Path, Results]:
        out = tmp_path_factory.mktemp("demo") / "new" / "folder"
        demo.main(["--epochs", "1", "--seed", "3", "--out", str(out)])
        return out, json.loads((out / "results.json").read_text())

    return run_demo


@pytest.fixture(scope="module")
def first(run: Callable[[], tuple[Path, Results]]) -> tuple[Path, Results]:
    return run()


def test_table(demo: ModuleType, first: tuple[Path, Results]) -> None:
    full, sampled = first[1]
    header, *lines = demo.table([full, sampled]).splitlines()
    assert header.split() == ["test", "accuracy", "saved", "activations", "time", "per", "step"]
    assert lines[0].startswith("full backprop")
    assert lines[1].startswith("SBP, r = 0.5")
    assert f"{sampled['saved_mib']:.2f} MiB {sampled['saved_ratio']:.2f}×" in lines[1]
    assert full["saved_ratio"] == full["step_ratio"] == 1
    assert len(full["losses"]) == len(sampled["losses"]) == STEPS


def test_the_runs_start_equal_and_differ_by_their_gradients(first: tuple[Path, Results]) -> None:
    full, sampled = first[1]
    assert sampled["losses"][0] == pytest.approx(full["losses"][0], rel=1e-5)
    assert sampled["losses"][-1] != full["losses"][-1]


def test_memory_is_saved(first: tuple[Path, Results]) -> None:
    full, sampled = first[1]
    assert sampled["saved_mib"] / full["saved_mib"] == sampled["saved_ratio"] < 0.3


def test_same_result_for_the_same_seed(run: Callable[[], tuple[Path, Results]], first: tuple[Path, Results]) -> None:
    _, again = run()
    for before, after in zip(first[1], again, strict=True):
        for key in ("losses", "test_accuracies", "saved_mib"):
            assert before[key] == after[key]


def test_picture(first: tuple[Path, Results]) -> None:
    picture = (first[0] / "kept.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    width, height = (int.from_bytes(picture[start : start + 4], "big") for start in (16, 20))
    assert (width, height) == (1200, 960)
    assert len(picture) > 20_000


def test_masks_differ_from_the_one_before(demo: ModuleType) -> None:
    options = ["--epochs=1", "--schedule.warmup_epochs=0", "--sbp.preset=default", "--sbp.keep_ratio=0.5"]
    trainer = demo.prepare(*options)
    found = demo.masks(trainer.model, demo.shown(trainer), 5)
    assert len(found) == 5
    steps, kept = list(found), list(found.values())
    assert steps == sorted(steps)
    assert not any(torch.equal(a, b) for a, b in pairwise(kept))
    assert all(mask.shape == kept[0].shape for mask in kept)


def test_page(first: tuple[Path, Results]) -> None:
    page = (first[0] / "report.html").read_text()
    assert page.count('role="img"') == 6
    assert (first[0] / "sbp" / "checkpoints" / "best.pt").exists()


def test_shade_marks_kept_patches(demo: ModuleType) -> None:
    blank = torch.zeros(1, 1, demo.SIZE, demo.SIZE)
    blank[..., -1, -1] = 1.0
    pixels = demo.shade(blank, torch.tensor([[1]]))[0]
    assert pixels[0, demo.PATCH] == pytest.approx(demo.KEPT)
    assert pixels[0, 0] == pytest.approx((1.0, 1.0, 1.0))
    assert pixels[-1, -1] == pytest.approx((0.85, 0.85, 0.85))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--keep-ratio", "1.5"], "keep_ratio must be a number in (0, 1], found 1.5"),
        (["--keep-ratio", "0.001"], "ratio 0.001 keeps none of the 64 cells of grid (8, 8)"),
        (["--epochs", "0"], "--epochs must be at least 1, found 0"),
    ],
)
def test_bad_options_are_refused(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        demo.main([*arguments, "--out", str(tmp_path / "none")])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()

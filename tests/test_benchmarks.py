"""The benchmarks, on tiny models on the CPU: methods do what their names say, failures are rows, searches are right."""

import importlib
import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from torchsbp.cli.study import checkout

from .counting import SavedBytes

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NAMES = ("methods", "models", "case", "children", "commandline", "peak", "run", "limits", "growth", "plot")


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The modules of the benchmarks by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})


def saved_bytes(bench: SimpleNamespace, model: str, method: str) -> int:
    case = bench.case.Case(bench.case.Setting(model, method, size=96, bf16=False))
    with SavedBytes(case.model, case.images) as saved:
        loss = case.forward()
    loss.backward()
    return saved.total


def test_every_method_steps_and_changes_the_weights(bench):
    for model in ("test_vit", "test_convnext", "test_video"):
        for title, method in bench.methods.METHODS.items():
            if method.suits(model, "eager"):
                case = bench.case.Case(bench.case.Setting(model, title, bf16=False))
                before = [p.detach().clone() for p in case.model.parameters()]
                case.steps(1)
                pairs = zip(before, case.model.parameters(), strict=True)
                assert all(p.grad is not None and not torch.equal(old, p) for old, p in pairs), (model, title)


def test_the_commit_is_that_of_the_package_wherever_the_command_runs(bench, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = Namespace(device="cpu", bf16=True, commit="")
    assert bench.commandline.environment(args)["commit"] == checkout()
    args.commit = "abc"
    assert bench.commandline.environment(args)["commit"] == "abc"


@pytest.mark.parametrize(
    "less, more",
    [
        ("checkpoint", "exact, lean (r=1)"),
        ("exact, lean (r=1)", "sbp query r=0.5, saved"),
        ("sbp query r=0.5", "exact, lean (r=1)"),
        ("sbp query r=0.25", "sbp query r=0.5"),
        ("sbp query r=0.25, all blocks", "sbp query r=0.25"),
        ("sbp query r=0.25, saved", "sbp query r=0.5, saved"),
        ("sbp query r=0.5, saved + checkpoint", "sbp query r=0.5, saved"),
        ("sbp query r=0.5, saved", "full"),
    ],
)
def test_methods_save_what_their_names_say(bench, less, more):
    for model in ("test_vit", "test_convnext"):
        assert saved_bytes(bench, model, less) < saved_bytes(bench, model, more), model


def test_saved_bytes_of_methods_for_vits(bench):
    methods = {title for title, method in bench.methods.METHODS.items() if method.suits("test_vit", "eager")}
    sizes = {title: saved_bytes(bench, "test_vit", title) for title in methods}
    assert sizes["sbp qkv r=0.5"] < sizes["sbp query r=0.5"]
    assert sizes["sbp qkv r=0.5, saved"] < sizes["sbp query r=0.5, saved"]
    assert sizes["sbp query r=0.5, saved"] < sizes["algorithm 1, r=0.5"] < sizes["full"]
    assert sizes["patch drop 0.5"] < 0.65 * sizes["full"]


def test_checkpoint_wraps_the_blocks_that_are_not_sampled(bench):
    for model, exact in (("test_vit", 2), ("test_convnext", 3)):
        case = bench.case.Case(bench.case.Setting(model, "sbp query r=0.5, saved + checkpoint", bf16=False))
        wrapped = [module for module in case.model.modules() if "forward" in vars(module)]
        assert len(wrapped) == exact
        assert all(block.sbp.sampling.site is None for block in wrapped)


def test_flops_are_those_of_torch_and_count_blocks_that_are_run_again(bench):
    for title in ("full", "checkpoint", "sbp query r=0.25"):
        setting = bench.case.Setting("test_vit", title, bf16=False)
        with FlopCounterMode(display=False) as counter:
            bench.case.Case(setting).forward().backward()
        assert bench.case.count_flops(setting, 2) == counter.get_total_flops()
    build = {"depth": 2, "embed_dim": 48, "num_heads": 2}
    settings = [bench.case.Setting("dinov3_base", f"sbp query r={r}", size=32, build=build) for r in (0.5, 0.25)]
    half, quarter = (bench.case.count_flops(setting, 2) for setting in settings)
    assert quarter < half


def test_where_methods_run(bench):
    def titles(model, mode):
        return {title for title, method in bench.methods.METHODS.items() if method.suits(model, mode)}

    assert titles("vit", "compiled") - titles("vit", "eager") == {"budget 0.5"}
    assert titles("vit", "eager") - titles("vit", "compiled") == {"offload"}
    assert not any("qkv" in title or "algorithm" in title for title in titles("convnext", "eager"))


def test_cases_by_name(bench):
    chosen = {"modes": None, "device": "cpu", "bf16": True, "cases": ["swin_tiny:full", "vit_base_64:own rows r=0.25"]}
    found = bench.commandline.settings(Namespace(**chosen))
    pairs = [("swin_tiny", "full"), ("vit_base_64", "own rows r=0.25")]
    assert [(its.model, its.method, its.mode) for its in found] == [
        (*pair, mode) for pair in pairs for mode in ("eager", "compiled")
    ]
    with pytest.raises(SystemExit, match=r"'swin_tiny:sbp qkv r=0.5' is no model and method"):
        bench.commandline.settings(Namespace(**chosen | {"cases": ["swin_tiny:sbp qkv r=0.5"]}))


def test_flops_scale_with_the_batch_and_count_what_is_left_out(bench):
    def flops(method, batch=2):
        return bench.case.count_flops(bench.case.Setting("test_vit", method, bf16=False), batch)

    assert flops("full", 64) == 32 * flops("full")
    assert flops("sbp query r=0.25, saved") < flops("sbp query r=0.25") < flops("full") < flops("checkpoint")


def test_side_by_side_end_to_end(bench, tmp_path):
    out = tmp_path / "new" / "rows.json"
    options = ["--models", "test_vit", "--device", "cpu", "--float32", "--steps", "2", "--warmup", "0", "--jobs", "2"]
    bench.run.main([*options, "--methods", "sbp query r=0.25, saved", "full", "--profile", "--out", str(out)])
    full, sampled = json.loads(out.read_text())["rows"]
    assert (full["method"], sampled["method"]) == ("full", "sbp query r=0.25, saved")
    assert full["speed"] == full["ideal speed"] == full["measured/ideal"] == 1
    assert sampled["ideal speed"] == full["flops"] / sampled["flops"] > 1
    assert sampled["measured/ideal"] == sampled["speed"] / sampled["ideal speed"]
    assert sampled["speed"] == full["step ms"] / sampled["step ms"]
    profiles = sorted(path.name for path in out.parent.glob("*.txt"))
    assert profiles == [
        "rows-test_vit-eager-full-profile.txt",
        "rows-test_vit-eager-sbp_query_r=0.25_saved-profile.txt",
    ]
    assert "ms busy in" in (out.parent / profiles[0]).read_text()


def test_names_of_files_differ(bench):
    rows = [{"model": "vit", "mode": "eager", "method": title} for title in bench.methods.METHODS]
    assert len({bench.run.file_name(row) for row in rows}) == len(rows)


def test_ratios_to_checkpointing_and_of_memory(bench):
    names = {"model": "vit", "mode": "compiled", "batch": 8}
    rows = [
        names | {"method": "full", "step ms": 40.0, "peak MiB": 200.0, "flops": 18, "batch": 16},
        names | {"method": "full", "step ms": 20.0, "peak MiB": 100.0, "flops": 9},
        names | {"method": "checkpoint", "step ms": 25.0, "peak MiB": 30.0, "flops": 12},
        names | {"method": "sbp", "step ms": 16.0, "peak MiB": 25.0, "flops": 6},
        names | {"method": "budget 0.5", "step ms": 22.0, "peak MiB": 60.0},
        names | {"method": "broken", "error": "out of memory"},
    ]
    bench.run.add_ratios(rows)
    assert rows[3]["memory"] == 0.25
    assert rows[3]["vs checkpoint"] == 25 / 16
    assert rows[3]["measured/ideal"] == pytest.approx((20 / 16) / 1.5)
    assert "ideal speed" not in rows[4]
    assert "speed" not in rows[5]


def serve(bench, work) -> list[dict]:
    """What a child process with this work would send, the word to go on given beforehand."""
    ours, theirs = bench.children.CONTEXT.Pipe()
    for _ in range(2):
        ours.send("measure")
    bench.children.serve(theirs, work, bench.case.Setting("test_vit", "full"))
    sent = []
    with suppress(EOFError, ConnectionResetError):
        while True:
            sent.append(ours.recv())
    return sent


def test_a_child_sends_its_rows_and_its_errors(bench, capsys):
    def fails(setting):
        yield {}
        yield {"value": 1}
        raise ValueError("broken\nsecond line")

    def needs_too_much(setting):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        yield {}

    assert serve(bench, fails) == [{}, {"value": 1}, {"error": "ValueError: broken"}]
    assert serve(bench, needs_too_much) == [{"error": "out of memory"}]
    assert "second line" in capsys.readouterr().err


def test_a_child_that_hangs_or_dies_is_an_error_row(bench):
    setting = bench.case.Setting("test_vit", "full")
    rows = list(bench.children.run_group(bench.case.measured, [setting], limit=0, turns=False))
    assert rows == [(setting, setting.names | {"error": "not done after 0 s"})]
    child = bench.children.Child(bench.case.measured, setting, limit=60)
    child.process.kill()
    assert child.listen() == {"error": "the process ended with exit code -9"}
    assert child.pipe.closed


def test_a_case_without_memory_beside_others_runs_again_alone(bench, monkeypatch):
    def run_group(work, settings, limit, turns):
        crowded = len(settings) > 1
        for s in settings:
            yield s, s.names | ({"error": "out of memory"} if crowded and s.method == "a" else {})

    monkeypatch.setattr(bench.children, "run_group", run_group)
    settings = [bench.case.Setting("test_vit", method) for method in "ab"]
    assert list(bench.children.run(bench.case.measured, settings, 2, 1)) == [s.names for s in reversed(settings)]


def test_cases_take_turns(bench, monkeypatch):
    times = {"a": [5.0, 1.0, 3.0], "b": [4.0, 4.0, 2.0]}

    class Child:
        def __init__(self, work, setting, limit):
            self.setting = setting

        def listen(self):
            return {}

        def measure(self):
            yield from ({"step ms": time} for time in times[self.setting.method])

        def stop(self):
            pass

    monkeypatch.setattr(bench.children, "Child", Child)
    settings = [bench.case.Setting("test_vit", method) for method in "ab"]
    rows = list(bench.children.run(bench.case.measured, settings, 2, 1, turns=True))
    assert [row["method"] for row in rows] == ["a", "b"] * 3
    assert [(row["step ms"], row["rounds ms"]) for row in rows[-2:]] == [(3.0, times["a"]), (4.0, times["b"])]
    in_order = bench.children.run(bench.case.measured, settings, 2, 1)
    assert [row["method"] for row in in_order] == ["a"] * 3 + ["b"] * 3


def test_groups_keep_a_model_and_its_mode_together(bench):
    def setting(name):
        return bench.case.Setting(name[0], name[1])

    names = ["a1", "a2", "b1", "b2", "c1", "c2", "c3", "c4", "c5"]
    found = bench.children.groups([setting(name) for name in names], 4)
    assert [[s.model + s.method for s in group] for group in found] == [names[:4], names[4:8], names[8:]]
    assert [len(group) for group in bench.children.groups([setting(name) for name in names[:4]], 3)] == [2, 2]


@pytest.mark.parametrize("edge", [0, 3, 8, 17, 256, 1000, 4711])
@pytest.mark.parametrize("guess", [0, 8, 250, 1000, 6000])
def test_largest_finds_the_edge(bench, edge, guess):
    tried = []

    def fits(batch):
        tried.append(batch)
        return batch <= edge

    assert bench.limits.largest(fits, guess, 8) == edge // 8 * 8
    assert all(batch > 0 and batch % 8 == 0 for batch in tried)
    assert len(tried) == len(set(tried)) <= 24


def test_largest_is_near_when_the_guess_is_near_and_stops(bench):
    tried = []
    assert bench.limits.largest(lambda batch: tried.append(batch) or batch <= 1000, 992, 8) == 1000
    assert len(tried) <= 4
    assert bench.limits.largest(lambda batch: batch < 10**9, 8, 8, trials=5) < 10**9
    peaks = [1000.0 + batch * 50 for batch in bench.limits.SMALL]
    assert bench.limits.predict(peaks, 1000.0 + 640 * 50) == 640


def test_rows_of_a_later_run_are_taken_over(bench, tmp_path, capsys):
    about = {"device": "H200", "torch": "2.11", "precision": "bf16"}

    def file(name: str, commit: str, *rows: tuple[str, str, float], **changes: str) -> Path:
        found = [
            {"model": model, "mode": "eager", "batch": 8, "method": method, "step ms": ms, "speed": 1.0}
            for model, method, ms in rows
        ]
        (tmp_path / name).write_text(json.dumps(about | changes | {"commit": commit, "rows": found}))
        return tmp_path / name

    known = file("known.json", "per row", ("vit_base", "full", 9.0), ("swin_tiny", "full", 5.0))
    later = file("later.json", "abc", ("swin_tiny", "full", 4.0), ("vit_base", "checkpoint", 12.0))
    bench.run.main(["--show", str(known), "--add", str(later)])
    assert "| swin_tiny, 8 | full | – | 4.0 ms, 1.00× speed | abc |" in capsys.readouterr().out
    found = json.loads(known.read_text())
    assert {name: found[name] for name in (*about, "commit")} == about | {"commit": "per row"}
    assert [(row["model"], row["method"], row["step ms"], row.get("commit")) for row in found["rows"]] == [
        ("vit_base", "full", 9.0, None), ("vit_base", "checkpoint", 12.0, "abc"), ("swin_tiny", "full", 4.0, "abc"),
    ]  # fmt: skip
    with pytest.raises(SystemExit, match=r"with device 'H100' instead of 'H200'; keep its rows in a file of their own"):
        bench.run.main(["--show", str(known), "--add", str(file("other.json", "abc", device="H100"))])


def test_limits_table(bench):
    names = {"model": "vit", "mode": "eager"}
    rows = [
        names | {"method": "full", "limit GiB": 16.0, "batch": 0},
        names | {"method": "full", "limit GiB": 24.0, "batch": 8, "images/s": 99.6},
    ]
    assert bench.limits.markdown(rows).splitlines() == [
        "| model | method | 16 GiB: batch, speed | 24 GiB: batch, speed |",
        "|---|---|---|---|",
        "| vit | full | – | 8, 100 images/s |",
    ]


def event(action: str, addr: int, mib: int, *names: str) -> dict:
    frames = [{"filename": f"/somewhere/ops/{name}.py", "line": 7, "name": name} for name in names]
    return {"action": action, "addr": addr, "size": mib * 2**20, "frames": frames}


def test_what_is_alive_at_the_peak(bench):
    trace = [
        event("free_requested", 9, 10),  # from before the trace
        event("segment_alloc", 1, 1000),
        event("alloc", 1, 20, "gelu", "mlp"),
        event("alloc", 2, 20, "gelu", "mlp"),
        event("alloc", 3, 5),
        event("free_requested", 3, 5),
        event("free_completed", 3, 5),
        event("alloc", 3, 30, "attend"),  # the peak: -10 + 20 + 20 + 30, the address used again
        event("free_requested", 1, 20),
        event("alloc", 4, 15, "later"),
    ]
    most, live = bench.peak.live_at_peak(trace)
    assert most == 60 * 2**20
    assert [(e["addr"], e["size"] // 2**20) for e in live] == [(1, 20), (2, 20), (3, 30)]
    lines = bench.peak.describe(100 * 2**20, most, live).splitlines()
    assert lines[0].startswith("160.0 MiB at the peak: 70.0 MiB in 3 allocations of this step, 90.0 MiB from before")
    assert [" ".join(line.split()) for line in lines[1:]] == [
        *("40.0 MiB = 2 × 20.0 MiB", "ops/gelu.py:7 gelu", "ops/mlp.py:7 mlp"),
        *("30.0 MiB = 1 × 30.0 MiB", "ops/attend.py:7 attend"),
    ]
    assert bench.peak.live_at_peak([]) == (0, [])


def test_growth_rows_on_the_cpu(bench):
    setting = bench.case.Setting("test_vit", "full", bf16=False, warmup=0, steps=2)
    ready, *rows = bench.growth.sweep(setting, "resolution", (32, 64))
    assert ready == {}
    assert [(row["value"], row["size"], row["batch"]) for row in rows] == [(32, 32, 8), (64, 64, 8)]
    depth = bench.case.Case(bench.growth.grown(setting, "depth", 3)).model
    assert len(depth.blocks) == 3


def test_pareto_front(bench):
    assert bench.plot.pareto([(1.0, 1.0), (0.3, 1.2), (0.5, 1.3), (0.6, 1.25), (0.3, 0.8)]) == [(0.3, 1.2), (0.5, 1.3)]


def picture_rows(kind: str, titles: list[str]) -> list[dict]:
    names = [{"model": "vit", "mode": "eager", "method": title, "batch": 8, "size": 224} for title in titles]
    if kind == "front":
        return [row | {"step ms": 1, "memory": 1 / i, "speed": 1 + i % 5 / 9} for i, row in enumerate(names, 1)]
    if kind == "limits":
        return [row | {"limit GiB": limit, "images/s": 100 * limit} for row in names for limit in (16, 24)]
    grown = [row | {"axis": "batch", "value": n, "peak MiB": n, "step ms": n} for row in names for n in (8, 16)]
    return [*grown, names[0] | {"axis": "batch", "value": 32, "error": "out of memory"}]


@pytest.mark.parametrize("kind", ["front", "limits", "growth"])
@pytest.mark.parametrize("suffix, head", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_pictures(bench, tmp_path, kind, suffix, head):
    source, out = tmp_path / "rows.json", tmp_path / "new" / f"picture.{suffix}"
    source.write_text(json.dumps({"rows": picture_rows(kind, list(bench.methods.METHODS))}))
    bench.plot.main([str(source), "--out", str(out)])
    assert out.read_bytes().startswith(head)
    assert out.stat().st_size > 10_000


def test_models_of_few_methods_share_a_panel_of_the_front(bench):
    rows = picture_rows("front", list(bench.methods.METHODS)[:8])
    few = [row | {"model": model} for model in ("swin", "convnext") for row in rows[:3]]
    assert few[0]["method"] == "full"
    own, shared = bench.plot.front([*rows, *few]).axes
    assert len(own.texts) == 8
    methods = [row["method"].removeprefix("sbp ") for row in few[1:3]]
    expected = {"full", *(f"{model}: {method}" for model in ("swin", "convnext") for method in methods)}
    assert {text.get_text() for text in shared.texts} == expected
    assert shared.get_title() == "swin, batch 8, eager\nconvnext, batch 8, eager"


def test_names_do_not_overlap_in_the_front(bench):
    figure = bench.plot.front(picture_rows("front", list(bench.methods.METHODS)))
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == len(bench.methods.METHODS)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])

"""The table and the page of torchsbp report; the page is opened in Chromium where there is one."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from torchsbp.cli.main import main
from torchsbp.report import html, markdown, read, read_all, repetitions, rows
from torchsbp.report.charts import Series, chart, label, thinned, ticks

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def write_run(folder: Path, seed: int, preset: str, gain: float, finished: bool = True) -> Path:
    folder.mkdir()
    config = {"out": str(folder), "seed": seed, "checkpoint": {"keep": 1 + seed}, "sbp": {"preset": preset}}
    environment = {"device": "CPU", "memory": "saved activations", "torch": "2.11", "processes": 1}
    lines = [{"kind": "run", "step": 0, "config": config, "environment": environment, "steps": 40}]
    for epoch in range(1, 5):
        values = {
            "loss": 2.0 / epoch,
            "lr": 0.1,
            "images_per_s": 100.0,
            "memory_mib": 40.0 + gain,
            "seconds": 60.0 * epoch,
        }
        lines.append({"kind": "train", "step": 10 * epoch, "epoch": epoch, **values})
        lines.append({"kind": "valid", "step": 10 * epoch, "epoch": epoch, "top1": 80 + epoch + gain, "top5": 99.0})
    if finished:
        lines.append({"kind": "end", "step": 40})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text if finished else text + '{"kind": "tra')
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        write_run(tmp_path / "full_0", 0, "none", 0.0),
        write_run(tmp_path / "full_1", 1, "none", 2.0),
        write_run(tmp_path / "sbp <0>", 0, "default", -1.0, finished=False),
    ]


def test_table(runs):
    header, *body = rows([read(path) for path in runs])
    table = [dict(zip(header, row, strict=True)) for row in body]
    assert table[0] == {
        "run": "full_0", "seed": "0", "top-1, %": "84.00", "best top-1, %": "84.00", "training loss": "0.500",
        "memory, MiB": "40.0", "images/s": "100", "minutes": "4.0", "state": "finished",
    }  # fmt: skip
    assert table[2]["state"] == "unfinished, step 40 of 40"  # killed: half a line is left out
    assert (table[3]["run"], table[3]["seed"], table[3]["top-1, %"]) == ("mean of full", "2 seeds", "85.00 ± 1.41")
    assert len(table) == 4
    assert len(set(map(len, markdown([header, *body]).splitlines()))) == 1


def test_repetitions_differ_by_seed_only(runs):
    groups = repetitions([read(path) for path in runs])
    assert [[run.name for run in group] for group in groups] == [["full_0", "full_1"], ["sbp <0>"]]


def test_the_page_needs_nothing_outside_it(runs, tmp_path, capsys):
    page = tmp_path / "new" / "report.html"
    assert main(["report", *map(str, runs), "--html", str(page)]) == 0
    text = page.read_text()
    assert "| full_0 " in capsys.readouterr().out
    assert not re.search(r"(src|href)=\"(?!data:)|url\(|@import|https?://", text)
    assert text.count('role="img"') == 6
    assert text.count("<polyline") == 12
    assert "sbp &lt;0&gt;" in text
    assert "<0>" not in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt install chromium)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser(runs, tmp_path, scheme):
    """No message on the console; every plot is laid out, with a size."""
    page = tmp_path / "report.html"
    main(["report", *map(str, runs), "--html", str(page)])
    probe = (
        "<script>document.title = [...document.querySelectorAll('figure svg')].map(s => s.getBoundingClientRect())"
        ".filter(r => r.width > 300 && r.height > 50).length + ' plots, '"
        " + getComputedStyle(document.body).backgroundColor</script>"
    )
    page.write_text(page.read_text().replace("</body>", probe + "</body>"))
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}/c",
    ]
    options += [f"--blink-settings=preferredColorScheme={int(scheme == 'light')}", "--dump-dom"]
    result = subprocess.run([CHROMIUM, *options, page.as_uri()], capture_output=True, text=True, timeout=60)
    background = "rgb(247, 247, 245)" if scheme == "light" else "rgb(21, 23, 26)"
    assert f"<title>6 plots, {background}</title>" in result.stdout
    assert "CONSOLE" not in result.stderr


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt install chromium)")
def test_on_a_narrow_screen_the_table_scrolls_and_the_page_does_not(runs, tmp_path):
    page = tmp_path / "report.html"
    main(["report", *map(str, runs), "--html", str(page)])
    probe = (
        "<script>const t = document.querySelector('.scroll'); document.title = [document.body.scrollWidth <= 600, "
        "t.scrollWidth > t.clientWidth, getComputedStyle(t).overflowX].join(' ')</script>"
    )
    page.write_text(page.read_text().replace("</body>", probe + "</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=600,900", f"--user-data-dir={tmp_path}/c"]
    command = [CHROMIUM, *options, "--dump-dom", page.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "<title>true true auto</title>" in result.stdout


def test_many_runs_are_told_apart_by_colour_and_dashes(tmp_path):
    """Also in the table's key; repetitions look the same."""
    folders = [write_run(tmp_path / f"run_{i}", i % 2, f"preset {i // 2}", 0.0) for i in range(22)]
    page = html(read_all(folders), "Many")
    losses = re.search(r"<figure><figcaption>Training loss.*?</figure>", page, re.S)[0]
    looks = re.findall(r'<polyline class="line (c\d d\d)"', losses)
    assert len(looks) == 22
    assert len(set(looks)) == 11
    assert looks[0::2] == looks[1::2]
    assert len({look.split()[0] for look in looks}) == 8
    assert re.findall(r'<line class="line (c\d d\d)"', page) == looks
    shapes = set(re.findall(r'<path class="dot c\d" transform="[^"]*" d="([^"]*)"', losses))
    assert len(shapes) == 4


def test_numbers_of_an_axis_have_the_same_decimals():
    series = [Series("run", 0, [(0.5, 0.93), (1.0, 1.07), (1.5, 1.52)])]
    labels = re.findall(r'class="tick"[^>]*>([^<]*)<', chart("Loss", "", series))
    assert labels == ["1.0", "1.1", "1.2", "1.3", "1.4", "1.5", *(f"{n / 4:.2f}" for n in range(7)), "epoch"]
    assert label(12345.6) == "12 346"


def test_metrics_are_shown_as_the_run_recorded_them(tmp_path):
    """Less is better, another unit, a format of its own; the metric without a column is in no table."""
    folder = write_run(tmp_path / "run", 0, "none", 0.0)
    first, *others = (folder / "metrics.jsonl").read_text().splitlines()
    error = {"name": "top1", "title": "distance", "unit": "m", "format": ".1f", "higher": False, "chart": "Distance"}
    task = {"unit": "frames", "metrics": [error, {"name": "top5", "column": False}]}
    lines = [json.dumps({**json.loads(first), "task": task}), *(o.replace("images_per", "frames_per") for o in others)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    header, row = rows([read(folder)])
    assert header[2:] == [
        "distance, m",
        "best distance, m",
        "training loss",
        "memory, MiB",
        "frames/s",
        "minutes",
        "state",
    ]
    assert row[2:7] == ["84.0", "81.0", "0.500", "40.0", "100"]
    page = html([read(folder)], "Distances")
    assert "<figcaption>Distance <small>distance, m</small>" in page
    assert "<small>frames/s</small>" in page


def test_a_number_that_is_logged_is_drawn(runs):
    text = (runs[0] / "metrics.jsonl").read_text().replace('"lr": 0.1', '"lr": 0.1, "gradient_norm": 2.0')
    (runs[0] / "metrics.jsonl").write_text(text)
    page = html([read(path) for path in runs], "Runs")
    assert page.count('role="img"') == 7
    assert "<figcaption>Gradient norm <small>" in page


def test_what_a_task_adds_is_on_the_page(runs):
    added = runs[0] / "report"
    added.mkdir()
    (added / "Confusion of <classes>.png").write_bytes(b"\x89PNG")
    (added / "Scores.html").write_text("<svg></svg>")
    page = html([read(path) for path in runs], "Runs")
    assert "<figcaption>Confusion of &lt;classes&gt;</figcaption><img" in page
    assert 'src="data:image/png;base64,iVBORw=="' in page
    assert "<h2>full_0</h2>" in page
    assert "<figcaption>Scores</figcaption><svg></svg></figure>" in page
    assert "<h2>full_1</h2>" not in page


def test_runs_recorded_before_tasks_described_themselves():
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "cifar10"
    header, *body = rows([read(path) for path in sorted(results.iterdir())])
    means = {row[0]: dict(zip(header, row, strict=True)) for row in body[-2:]}
    assert means["mean of cifar10_full"]["top-1, %"] == "74.76 ± 0.99"
    assert means["mean of cifar10_sbp"]["images/s"] == "5132 ± 53"


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert "is no run" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("x\n")
    assert main(["report", str(tmp_path)]) == 1
    assert "has no metrics" in capsys.readouterr().err


def test_ticks_are_round_and_long_curves_short():
    assert ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert ticks(0.11, 0.19, 4) == pytest.approx([0.12, 0.14, 0.16, 0.18])
    assert len(thinned([(i, i) for i in range(1001)])) <= 400


def test_unfinished_runs_are_marked_and_not_in_means(tmp_path):
    folders = [write_run(tmp_path / f"full_{seed}", seed, "none", 2.0 * seed, finished=seed < 2) for seed in range(3)]
    header, *body = rows(read_all(folders))
    mean = dict(zip(header, body[-1], strict=True))
    assert (mean["seed"], mean["top-1, %"], mean["state"]) == ("2 seeds", "85.00 ± 1.41", "without 1 unfinished")
    assert body[2][-1] == "unfinished, step 40 of 40"
    assert len(rows(read_all(folders[1:]))) == 3  # no mean of one


def test_a_run_that_is_given_twice_is_one(tmp_path, monkeypatch):
    """By another path, by a link, or as a copy."""
    folder = write_run(tmp_path / "full", 0, "none", 0.0)
    (tmp_path / "link").symlink_to(folder)
    shutil.copytree(folder, tmp_path / "copy")
    monkeypatch.chdir(folder)
    same = [folder, Path("../full"), folder / "metrics.jsonl", tmp_path / "link", tmp_path / "copy"]
    assert [row[0] for row in rows(read_all(same))[1:]] == ["full"]
    assert [run.name for run in read_all([Path(".")])] == ["full"]


def test_the_same_seed_again_is_no_other_seed(tmp_path):
    folders = [write_run(tmp_path / f"full_{i}", 0, "none", i) for i in range(2)]
    assert rows(read_all(folders))[-1][1] == "2 runs of 1 seed"


def test_runs_of_one_folder_name_are_told_apart(tmp_path):
    folders = []
    for seed, place in enumerate(("a/x", "a/y", "b/x")):
        (tmp_path / place).mkdir(parents=True)
        folders.append(write_run(tmp_path / place / "run", seed, "none", seed))
    folders.append(write_run(tmp_path / "other", 5, "none", 5))
    names = ["a/x/run", "a/y/run", "b/x/run", "other"]
    assert [run.name for run in read_all(folders)] == names
    page = html(read_all(folders), "Runs")
    assert all(f"<summary>{name}</summary>" in page for name in names)
    (tmp_path / "other" / "old.jsonl").write_text((folders[0] / "metrics.jsonl").read_text())
    assert [run.name for run in read_all([folders[3], folders[3] / "old.jsonl"])] == ["other (1)", "other (2)"]


def test_lines_that_are_no_metrics_are_left_out(tmp_path):
    folder = write_run(tmp_path / "full", 0, "none", 0.0)
    expected = rows([read(folder)])
    path = folder / "metrics.jsonl"
    strange = [
        b"[1, 2]",
        b"3",
        b'{"kind": 1, "step": 2}',
        b'{"kind": "train"}',
        b'{"kind": "train", "step": "x"}',
        b"\xff",
    ]
    strange += [
        b'{"kind": "train", "step": 40, "loss": 1.0}',
        b'{"kind": "train", "step": 40, "epoch": "x", "loss": 9}',
    ]
    path.write_bytes(b"\n".join([*strange, path.read_bytes()]))
    assert rows([read(folder)]) == expected


def test_studies_are_sections_beside_runs(runs, tmp_path, capsys):
    folder = tmp_path / "studies"
    folder.mkdir()
    (folder / "masks.jsonl").write_text("{}\n")
    (folder / "masks.md").write_text("| sampler | seen |\n| --- | --- |\n| <grid> | 0.5 |\n\nsaid & done\n")
    (folder / "masks_vit.svg").write_text("<svg>masks</svg>")
    page = tmp_path / "page.html"
    assert main(["report", str(folder), str(runs[0]), "--html", str(page)]) == 0
    text = page.read_text()
    assert "<h2>studies: masks</h2>" in text
    assert "<svg>masks</svg>" in text
    assert "<td>&lt;grid&gt;</td><td>0.5</td>" in text
    assert "<p>said &amp; done</p>" in text
    assert "full_0" in text
    assert "studies: masks" in capsys.readouterr().out
    assert main(["report", str(folder), "--html", str(page)]) == 0
    assert "Settings" not in page.read_text()

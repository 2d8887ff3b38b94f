"""How far a run is: a bar on a terminal, plain lines in a log."""

import re
import sys

from tqdm import tqdm

from torchsbp.train.progress import Lines, progress

from .runs import fork, recipe, run


def test_in_a_log_there_are_lines_and_no_carriage_returns(tmp_path):
    path = recipe(tmp_path, log={"progress": True})
    process = fork(path, "--log.every_seconds", "0", told=tmp_path / "told")
    process.join(120)
    log = (tmp_path / "told").read_bytes().decode()
    assert process.exitcode == 0, log
    assert "\r" not in log
    told = [line for line in log.splitlines() if line.startswith("step ")]
    assert len(told) == 17  # of 20 steps: since the first line of metrics, at the fourth
    form = r"step 20 of 20, epoch 2\.00, loss \d\.\d+, \d+ images/s, \d+ MiB, 00:00 left"
    assert re.fullmatch(form, told[-1])


def test_a_short_run_has_few_lines(tmp_path, capsys):
    run(tmp_path, log={"progress": True})
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert [line.partition(",")[0] for line in told] == ["step 4 of 20", "step 20 of 20"]


def test_lines_come_every_so_often(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    lines = Lines(100, 10, 30)
    lines.set_postfix_str("fine")
    for _ in range(50):
        now[0] += 2
        lines.update()
    lines.close()
    assert capsys.readouterr().err.splitlines() == [
        "step 11 of 100, fine, 02:58 left",
        "step 26 of 100, fine, 02:28 left",
        "step 41 of 100, fine, 01:58 left",
        "step 56 of 100, fine, 01:28 left",
        "step 60 of 100, fine, 01:20 left",
    ]


def test_on_a_terminal_there_is_a_bar(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar = progress(10, 0, 30, shown=True)
    bar.close()
    assert isinstance(bar, tqdm)

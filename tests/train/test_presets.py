"""Runs with presets whose numbers the model's family says: they are recorded, and a run goes on with them."""

import json
from pathlib import Path
from typing import Any

import pytest

from torchsbp.adapters import timm
from torchsbp.sampling.recommended import NAMES, VIT, Recommended

from ..steps import recommending
from .runs import final, run, same, stopped_at

OTHER = Recommended(*({"keep_ratio": 0.75} for _ in NAMES))
"""What may be recommended one day."""


def recorded(out: Path) -> dict[str, Any]:
    """What the record's first line says of SBP: the fields that are given."""
    first = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    return {name: value for name, value in first["config"]["sbp"].items() if value is not None}


@pytest.mark.parametrize("preset", NAMES)
def test_a_run_records_what_is_recommended_for_its_model(tmp_path, preset, capsys):
    numbers = getattr(VIT, preset)
    status, out = run(tmp_path, sbp={"preset": preset})
    assert status == 0
    assert recorded(out) == {"preset": preset, **numbers}
    given, whole = run(tmp_path / "given", sbp={"preset": "default", "blocks": None, **numbers})
    assert given == 0
    assert same(final(out), final(whole))


def test_what_is_given_is_recorded_as_it_is(tmp_path):
    sbp = {"preset": "fast", "keep_ratio": 0.5, "blocks": [1]}
    assert recorded(run(tmp_path, "--epochs=1", "--schedule.warmup_epochs=0", sbp=sbp)[1]) == sbp


def test_a_run_goes_on_with_its_record_when_something_else_is_recommended(tmp_path, capsys):
    _, whole = run(tmp_path / "whole")
    with stopped_at(7):
        run(tmp_path / "killed")
    numbers = [f"--sbp.{name}={value}" for name, value in recorded(tmp_path / "killed" / "run").items()]
    with recommending(OTHER, timm.VIT):
        status, out = run(tmp_path / "killed", "--resume=auto", *numbers)
    assert status == 0
    assert "was made with other settings" not in capsys.readouterr().err
    assert same(final(out), final(whole))


def test_a_run_says_when_something_else_is_recommended(tmp_path, capsys):
    with stopped_at(7):
        run(tmp_path)
    with recommending(OTHER, timm.VIT):
        assert run(tmp_path, "--resume=auto")[0] == 0
    ratio = VIT.fast["keep_ratio"]
    assert f"was made with other settings; now sbp.keep_ratio=0.75 instead of {ratio}" in capsys.readouterr().err

"""How options are read, and what counts as a changed setting when a run is resumed."""

import json
from dataclasses import asdict, replace

import pytest

from torchsbp.cli.recipe import parse
from torchsbp.train.config import EMA, Config, differences, plain
from torchsbp.train.tasks.classification import ClassificationOptions, Model


def config(**changes) -> Config:
    return Config(task=ClassificationOptions(name="classification"), **changes)


def test_a_setting_that_an_earlier_version_did_not_have_is_not_changed():
    recorded = plain(asdict(config()))
    for its in (recorded["ema"], recorded["task"]["data"]):
        its.pop("warmup", None)
        its.pop("crop_pct", None)
    del recorded["schedule"], recorded["task"]["name"], recorded["epochs"]
    assert differences(recorded, config()) == []
    now = config(ema=EMA(warmup=True), epochs=100)
    assert differences(recorded, now) == ["epochs=100 instead of 300", "ema.warmup=True instead of False"]


def test_options_within_are_compared_one_by_one():
    before = config()
    before.task.model = Model(options={"depth": 3, "embed_dim": 16})
    after = replace(before, seed=1, out="elsewhere", resume="auto")
    after.task = ClassificationOptions(name="classification", model=Model(options={"depth": 4}))
    assert differences(plain(asdict(before)), after) == [
        "task.model.options.depth=4 instead of 3",
        "task.model.options.embed_dim=None instead of 16",
        "seed=1 instead of 0",
    ]


def test_options_of_train_have_the_spellings_of_the_other_commands():
    common = ["digits", "--sbp.preset=default", "--seed=7"]
    found = parse("train", [*common, "--precision", "bf16", "--channels-last=true", "--keep-ratio", "0.25"])
    named = ["--precision=bfloat16", "--channels_last=true", "--sbp.keep_ratio=0.25"]
    assert found == parse("train", [*common, *named])
    assert (found.precision, found.channels_last, found.sbp.keep_ratio, found.seed) == ("bfloat16", True, 0.25, 7)
    assert parse("train", ["digits", "--precision=fp32"]).precision == "float32"
    assert parse("train", ["digits", "--precision=fp16"]).precision == "float16"


@pytest.mark.parametrize("length", [300, 2000])
def test_a_text_may_be_longer_than_any_file_name(length):
    """The operating system refuses to look for such a file."""
    text = json.dumps({"name": "classification", "model": {"name": "x" * length}})
    assert parse("train", ["digits", "--task", text]).task.model.name == "x" * length
    assert parse("train", ["--config", json.dumps({"task": json.loads(text)})]).task.model.name == "x" * length

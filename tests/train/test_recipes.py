"""Every shipped recipe: what its first lines promise, the papers' values, and a step of its training."""

import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import torchsbp
from torchsbp.cli.recipe import RECIPES, parse, recipes
from torchsbp.train.config import SBP
from torchsbp.train.detection.batches import padded_size
from torchsbp.train.distributed import Processes
from torchsbp.train.loop import Trainer

from .detection.runs import coco_folder
from .runs import evaluate, lines, run, train

TABLE_1 = {  # stochastic depth, top-1 and memory of the image paper
    "imagenet/vit_tiny": (0.0, "73.68 %", "8248 MB"),
    "imagenet/vit_tiny_sbp": (0.0, "73.09 %", "5587 MB"),
    "imagenet/vit_base": (0.5, "81.22 %", "10083 MB"),
    "imagenet/vit_base_sbp": (0.3, "80.62 %", "7436 MB"),
    "imagenet/convnext_tiny": (0.1, "82.1 %", "12134 MB"),
    "imagenet/convnext_tiny_sbp": (0.1, "81.61 %", "7059 MB"),
    "imagenet/convnext_base": (0.5, "83.8 %", "14130 MB"),
    "imagenet/convnext_base_sbp": (0.3, "83.27 %", "8758 MB"),
}


def picture_folder(root: Path, parts: tuple[str, ...] = ("train", "val"), classes: int = 3, each: int = 4) -> Path:
    generator = np.random.default_rng(0)
    for part in parts:
        for label in range(classes):
            folder = root / part / f"class{label}"
            folder.mkdir(parents=True)
            for i in range(each):
                pixels = generator.integers(0, 256, (40, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.jpg")
    return root


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_opens_with_command_hardware_and_numbers(name):
    text = (RECIPES / f"{name}.yaml").read_text()
    head = text[: text.index("\ntask:")]
    assert all(line.startswith("#") for line in head.splitlines())
    assert f"torchsbp.train {name} " in head or f"torchsbp train {name} " in head
    assert "Hardware" in head
    assert "paper's number" in head or "papers' number" in head
    assert "Ours: " in head


@pytest.mark.parametrize("name", TABLE_1)
def test_table_1_is_set_as_in_the_paper(name):
    config = parse("train", [name])
    depth, top1, memory = TABLE_1[name]
    text = (RECIPES / f"{name}.yaml").read_text()
    assert f"The paper's number: {top1} top-1, {memory}/GPU" in text.replace("\n# ", " ")
    assert config.task.model.drop_path == depth
    assert (config.epochs, config.batch, config.schedule.warmup_epochs, config.ema.decay) == (300, 4096, 20, 0.9999)
    optimizer, augment = config.optimizer, config.task.augment
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay) == ("adamw", 4e-3, 0.05)
    assert (augment.mixup, augment.cutmix, augment.smoothing, augment.erase) == (0.8, 1.0, 0.1, 0.25)
    assert augment.auto_augment == "rand-m9-mstd0.5-inc1"
    paper = torchsbp.SBPConfig.preset("paper") if name.endswith("_sbp") else None
    assert config.sbp.build(0, 10) == paper


SMALL = ["--device=cpu", "--precision=float32", "--compile=false", "--log.progress=false", "--task.data.workers=0"]


DETECTION = [name for name in recipes() if name.startswith("coco/") or name == "penn_fudan"]


def of_classification(name: str) -> bool:
    return "task:\n  name:" not in (RECIPES / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", [name for name in recipes() if of_classification(name) and name != "digits"])
def test_a_recipe_trains(name, tmp_path, monkeypatch):
    """Its own settings, on a dozen pictures and a smaller model of its family."""
    size = "32" if "cifar" in name else "64"
    data = picture_folder(tmp_path / "data")
    options = [
        f"--task.data.root={data}",
        f"--task.data.size={size}",
        "--task.data.classes=3",
        "--task.data.source=folder",
    ]
    if "convnext" in name:
        options += ["--task.model.name=convnext_atto"]
    else:
        options += ["--task.model.options.embed_dim=12", "--task.model.options.num_heads=3"]
        options += [f"--task.model.options.img_size={size}", "--task.model.options.depth=3"]
    options += ["--epochs=1", "--schedule.warmup_epochs=0", "--batch=12", "--micro_batch=6", "--log.tensorboard=false"]
    out = tmp_path / "run"
    assert train([name, *SMALL, *options, f"--out={out}"]) == 0
    assert [line["kind"] for line in lines(out)] == ["run", "train", "valid", "end"]


TABLE_2 = {  # box AP, mask AP, memory of the image paper; lr, layer decay, drop path, proposals of ConvNeXt's recipes
    "coco/mask_rcnn_convnext_tiny": ("46.2", "41.7", "8.6 GB", 1e-4, 0.95, 0.4, 1000),
    "coco/mask_rcnn_convnext_tiny_sbp": ("45.5", "41.1", "5.9 GB", 1e-4, 0.95, 0.4, 1000),
    "coco/cascade_mask_rcnn_convnext_base": ("52.7", "45.6", "17.4 GB", 2e-4, 0.8, 0.7, 2000),
    "coco/cascade_mask_rcnn_convnext_base_sbp": ("52.5", "45.4", "12.5 GB", 2e-4, 0.8, 0.7, 2000),
}


@pytest.mark.parametrize("name", TABLE_2)
def test_table_2_is_set_as_in_the_paper(name):
    config = parse("train", [name])
    boxes, masks, memory, lr, decay, drop_path, proposals = TABLE_2[name]
    text = (RECIPES / f"{name}.yaml").read_text()
    assert f"The paper's number: {boxes} box AP, {masks} mask AP, {memory}/GPU" in text
    model, optimizer, schedule, augment = config.task.model, config.optimizer, config.schedule, config.task.augment
    assert model.kind == name.removeprefix("coco/").partition("_convnext")[0]
    assert (model.drop_path, model.proposals, model.options) == (drop_path, proposals, {"ls_init_value": 1.0})
    assert (optimizer.lr, optimizer.layer_decay, optimizer.weight_decay) == (lr, decay, 0.05)
    assert optimizer.clip_norm is None
    assert (config.epochs, config.batch, schedule.name, schedule.warmup_steps) == (36, 16, "multistep", 1000)
    assert schedule.warmup_lr == pytest.approx(lr * 1e-3)
    assert schedule.options == {"decay_milestones": [27, 33], "decay_rate": 0.1}
    assert (augment.short, augment.long, augment.eval_short) == ([*range(480, 801, 32)], 1333, 800)
    assert (augment.crop, augment.crop_short, augment.crop_sides) == (True, [400, 500, 600], (384, 600))
    ours = torchsbp.SBPConfig.preset("paper", per_sample=True, exact_downsampling=True)
    assert config.sbp.build(0, 10) == (ours if name.endswith("_sbp") else None)


def test_table_2_pads_any_two_images_to_one_of_nine_sizes():
    first, *others = (parse("train", [name]).task.data.buckets for name in TABLE_2)
    assert all(its == first for its in others)
    assert len(first) == 9
    assert padded_size([(1333, 800), (800, 1333)], first, 32) == (1344, 1344)
    assert padded_size([(800, 1067), (480, 640)], first, 32) == (800, 1120)
    assert padded_size([(800, 800), (480, 480)], first, 32) == (800, 896)


@pytest.mark.parametrize("name", DETECTION)
def test_a_recipe_of_detectors_trains(name, tmp_path):
    """Its own settings, on eight small pictures and a smaller model of its family."""
    model = "--task.model."
    options = [
        f"{model}pretrained=false", f'{model}options={{"depths": [1, 1, 2, 1], "dims": [8, 12, 16, 20]}}',
        f"{model}width=32", f"{model}hidden=16", f"{model}sampled=16", f"{model}proposals=50", f"{model}drop_path=0.1",
        f"--task.data.root={coco_folder(tmp_path / 'data')}", "--task.data.train=train", "--task.data.valid=val",
        "--task.data.train_json=annotations/train.json", "--task.data.valid_json=annotations/val.json",
        "--task.data.buckets=[[64, 96], [96, 96]]", "--task.augment.short=[48, 64]", "--task.augment.long=96",
        "--task.augment.crop_short=[64]", "--task.augment.crop_sides=[40, 60]", "--task.augment.eval_short=64",
        "--epochs=1", "--batch=4", "--micro_batch=2", "--schedule.warmup_steps=1", "--log.tensorboard=false",
    ]  # fmt: skip
    out = tmp_path / "run"
    assert train([name, *SMALL, *options, f"--out={out}"]) == 0
    assert [line["kind"] for line in lines(out)] == ["run", "train", "valid", "end"]


@pytest.mark.slow
def test_digits_learns_with_sbp(tmp_path):
    """Full backpropagation reaches 89.9 %."""
    options = ["--epochs=4", "--log.progress=false", "--sbp.preset=fast"]
    assert train(["digits", *options, f"--out={tmp_path / 'run'}"]) == 0
    assert lines(tmp_path / "run")[-2]["top1"] > 85


SEEDS = ([], ["--sbp.seed=5"])  # the run's, and one of its own


def test_the_options_of_sbp_are_those_of_its_config():
    own = {field.name for field in fields(SBP)} - {"preset", "schedule"}
    assert own == {field.name for field in fields(torchsbp.SBPConfig)}
    seeds = [parse("train", ["digits", "--sbp.preset=default", *given]).sbp.build(7, 1).seed for given in SEEDS]
    assert seeds == [7, 5]


def test_a_keep_ratio_schedule_counts_epochs(tmp_path):
    """With two forwards per update, and the ratio of the model at each."""
    config = parse("train", ["digits", "--sbp.preset=default", "--sbp.schedule=[[0, 0.25], [1, 0.5], [1.5, 1.0]]"])
    assert config.sbp.build(7, 20) == torchsbp.SBPConfig(
        keep_ratio=torchsbp.schedules.Milestones(((0, 0.25), (20, 0.5), (30, 1.0))), seed=7
    )
    trainer = Trainer(config, Processes(torch.device("cpu")))
    trainer.model.train()
    batch = trainer.task.prepare(next(trainer.batches()), training=True)
    for epoch, kept in ((0.0, 16), (1.0, 32), (1.5, 64)):
        trainer.forward(round(epoch * trainer.order.batches_per_epoch), batch)
        assert next(iter(torchsbp.kept(trainer.model).values())).shape[1] == kept


def test_print_config_shows_recipe_and_overrides(capsys):
    with pytest.raises(SystemExit) as stop:
        train(["cifar10", "--sbp.preset=default", "--print_config"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "source: cifar10" in text
    assert "preset: default" in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nothing"], "no recipe 'nothing': neither a file nor one of cifar10, cifar100, coco/"),
        (["digit"], "; did you mean digits?\n"),
        (["digits", "--epochs=0"], "epochs=0 is not allowed; allowed: an integer at least 1"),
        (["digits", "--batch=33", "--micro_batch=32"], "batch=33 is not a multiple of processes · micro_batch"),
        (["digits", "--epochs=1"], "schedule.warmup_epochs=1.0 is not allowed; allowed: a number in [0, epochs=1)"),
        (["digits", "--batch=5000"], "1400 training samples are fewer than one batch of 5000"),
        (["digits", "--sbp.keep_ratio=0.5"], "sbp.preset is none (full backprop), but {'keep_ratio': 0.5} is given"),
        (["digits", "--sbp.preset=default", "--sbp.keep_ratio=2"], "keep_ratio must be a number in (0, 1], found 2"),
        (["digits", "--task.model.name=resnet18", "--task.model.options={}", "--task.model.init={}",
          "--sbp.preset=default"], "nothing to patch in timm.models.resnet.ResNet"),
        (["digits", "--task.model.name=nothing"], "task.model.name nothing"),
        (["digits", "--device=cuda"], "device is cuda, but torch finds no GPU"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(arguments, message, tmp_path, capsys):
    if "cuda" in message and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code = train([*arguments, f"--out={tmp_path / 'run'}"])
    assert code in (1, 2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_unknown_option_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        train(["digits", "--optimizer.rl=1"])
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert "optimizer.rl" in told
    assert len(told.splitlines()) < 5  # not the names of all options


def test_eval_repeats_the_run_s_numbers(tmp_path, capsys):
    import json

    _, out = run(tmp_path)
    capsys.readouterr()
    assert evaluate([str(out), "--weights=model"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = next(line for line in lines(out) if line["kind"] == "valid" and line["step"] == found["step"])
    assert found["top1"] == expected["top1"]
    assert evaluate([str(out)]) == 0  # the average
    assert json.loads(capsys.readouterr().out)["top1"] == expected["ema_top1"]


def test_throughput(capsys, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", time.process_time)  # beside others a clock says little
    assert train(["digits", "--throughput=2", "--batch=16", "--sbp.preset=fast"]) == 0
    text = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in text[:3]] == ["loader", "step", "whole"]
    loader, step, whole = (float(line.split()[1]) for line in text[:3])
    assert whole <= 1.5 * min(loader, step)

"""The task of online action detection: trained, killed and resumed, evaluated, reported."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from torchsbp.cli.main import main
from torchsbp.cli.recipe import parse, recipes
from torchsbp.errors import UsageError
from torchsbp.report import html, read
from torchsbp.train.data.generated import Generated
from torchsbp.train.data.samples import OfInput
from torchsbp.train.distributed import Processes
from torchsbp.train.loop import Trainer
from torchsbp.train.tasks.online_action import (
    Augment,
    Data,
    OnlineActionOptions,
    eval_transform,
    multi_label_loss,
    train_transform,
)

from .runs import evaluate, final, lines, same, stopped_at, train
from .test_thumos import layout, targets

SMALL = [
    "--task.data.videos=[4, 2]", "--task.data.frames=40", "--task.encoder.options.dims=[8, 8, 8, 8]",
    "--task.temporal.width=16", "--task.temporal.feedforward=16", "--task.window.long=8", "--task.window.work=8",
    "--epochs=2", "--batch=4", "--log.progress=false", "--log.every_steps=2", "--checkpoint.every_steps=1",
]  # fmt: skip
FULL = ["--sbp.preset=none", "--sbp.keep_ratio=null", "--sbp.sampler=null", "--sbp.per_sample=null"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("online") / "run"
    assert train(["online", *SMALL, f"--out={out}"]) == 0
    return out


def test_killed_and_resumed_it_ends_the_same(whole, tmp_path):
    options = ["online", *SMALL, f"--out={tmp_path / 'run'}"]
    with stopped_at(6):
        train(options)
    assert train([*options, "--resume=auto"]) == 0
    assert same(final(whole), final(tmp_path / "run"))


def test_it_is_evaluated_and_reported(whole, capsys):
    assert evaluate([str(whole)]) == 0
    found = json.loads(capsys.readouterr().out)
    line = next(its for its in lines(whole) if its["kind"] == "valid" and its["step"] == found["step"])
    names = ["map", "tad", *(f"tad_{overlap}" for overlap in (0.3, 0.4, 0.5, 0.6, 0.7))]
    assert [found[name] for name in names] == [line[name] for name in names]
    assert found["tad"] == pytest.approx(np.mean([found[name] for name in names[2:]]))
    page = html([read(whole)], "Shapes")
    assert all(text in page for text in ("Per-frame mAP", "Precision by action", "Diamond", "clips/s"))


def test_sbp_saves_a_fifth_of_what_full_backprop_saves(whole, tmp_path):
    """Of the encoder's activations; the temporal model's are all there."""
    assert train(["online", *SMALL, *FULL, "--epochs=1", "--schedule.warmup_epochs=0", f"--out={tmp_path}"]) == 0
    full, sampled = (
        next(its["memory_mib"] for its in lines(out) if its["kind"] == "train") for out in (tmp_path, whole)
    )
    assert sampled < 0.45 * full


@pytest.mark.parametrize(
    "options",
    [
        ["--task.encoder.frozen=true", *FULL],
        ["--task.encoder.checkpoint=true", *FULL],
        ["--task.encoder.checkpoint=true"],
        ["--task.encoder.tokens=0.5"],
        ["--task.window.work=4", "--task.window.work_rate=5", "--task.augment.color_jitter=0.2", *FULL],
        ["--task.encoder.name=torchvision/resnet18", "--task.encoder.options={}", "--task.encoder.lr=1e-5"],
        ["--task.encoder.name=vit_tiny_patch16_224", "--task.encoder.tokens=0.5",
         "--task.encoder.options={img_size: 32, patch_size: 8, embed_dim: 24, depth: 3, num_heads: 3}"],
        ["--task.encoder.name=efficientnet_lite0", "--task.encoder.options={}", "--task.encoder.warmup_epochs=0.5"],
        ["--sbp.keep_ratio=null", "--sbp.schedule=[[0, 0.2], [0.5, 1.0]]"],
    ],
    ids=["frozen", "checkpoint", "checkpoint, sbp", "tokens", "selection", "torchvision", "vit", "lite", "schedule"],
)  # fmt: skip
def test_it_trains_in_other_ways_too(tmp_path, options):
    short = ["--task.data.videos=[2, 1]", "--epochs=1", "--schedule.warmup_epochs=0"]
    assert train(["online", *SMALL, *short, *options, f"--out={tmp_path}"]) == 0
    assert [line["kind"] for line in lines(tmp_path)][-2:] == ["valid", "end"]


def test_every_frame_is_no_sampling(tmp_path, capsys):
    assert train(["online", *SMALL, "--sbp.keep_ratio=1", f"--out={tmp_path}"]) == 2
    assert "sbp.keep_ratio=1 keeps every frame, which is full backpropagation; set " in capsys.readouterr().err


def test_thumos_s_layout_trains(tmp_path):
    """Also videos that are shorter than the work memory, which are counted."""
    root = layout(tmp_path / "data")
    targets(root)
    options = [f"--task.data.root={root}", "--task.data.source=thumos", "--task.data.valid=train"]
    options += ["--task.window.work=16", "--batch=3"]
    task = Trainer(parse("train", ["online", *SMALL, *options]), Processes(torch.device("cpu"))).task
    assert task.notes == ("1 of 2 videos are shorter than the work memory, 16 frames",)
    assert train(["online", *SMALL, *options, f"--out={tmp_path / 'run'}"]) == 0
    assert lines(tmp_path / "run")[-2]["map"] > 0


def test_weights_are_not_evaluated_with_other_classes(tmp_path, capsys):
    """Of the same number: what is found would be called by other names."""
    root = layout(tmp_path / "data")
    targets(root)
    options = [f"--task.data.root={root}", "--task.data.source=thumos", "--task.data.valid=train", "--epochs=1"]
    assert train(["online", *SMALL, *options, "--schedule.warmup_epochs=0", f"--out={tmp_path / 'run'}"]) == 0
    names = (root / "classes.txt").read_text().split()
    (root / "classes.txt").write_text("\n".join(reversed(names)))
    assert evaluate([str(tmp_path / "run")]) == 1
    told = f"error: validation data have the columns {['Background', *reversed(names), 'Ambiguous']}, the weights ['Ba"
    assert told in capsys.readouterr().err


def test_without_any_action_metrics_are_0(tmp_path):
    root = layout(tmp_path / "data", ["video_validation_0000051,Diving,26,3.0,3.0,0,0"])
    targets(root)
    options = [f"--task.data.root={root}", "--task.data.source=thumos", "--task.data.valid=train", "--epochs=1"]
    assert train(["online", *SMALL, *options, "--schedule.warmup_epochs=0", f"--out={tmp_path / 'run'}"]) == 0
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert [lines(tmp_path / "run")[-2][name] for name in ("map", "tad", "tad_0.5")] == [0, 0, 0]


@pytest.mark.parametrize("name", [name for name in recipes() if name.startswith("thumos/")])
def test_published_settings(name):
    config = parse("train", [name])
    its, optimizer = config.task, config.optimizer
    assert its.encoder.name == "resnet50"
    assert (its.temporal.width, its.temporal.heads) == (1024, 16)
    assert (config.epochs, config.batch, optimizer.name, optimizer.lr) == (25, 16, "adam", 5e-5)
    assert (optimizer.weight_decay, optimizer.clip_norm) == (5e-5, 20.0)
    assert (config.schedule.name, config.schedule.options["decay_milestones"]) == ("multistep", [13, 24])
    if name != "thumos/lstr_frozen":
        assert (its.encoder.lr, its.encoder.warmup_epochs) == (3e-6, 1.0)
    frames = its.window.long + its.window.work
    assert frames == (32 if name == "thumos/lstr_selection" else 160)
    sbp = config.sbp.build(0, 1)
    assert (sbp.keep_ratio if sbp else None) == (0.2 if name == "thumos/lstr_sbp" else None)


@pytest.mark.parametrize("name", [name for name in recipes() if name.startswith("thumos/")])
def test_a_recipe_trains(name, tmp_path):
    """Its own settings, on two short videos, with a smaller encoder and temporal model."""
    root = layout(tmp_path / "data")
    targets(root)
    options = [
        "--task.encoder.name=resnet18", "--task.temporal.width=32", "--task.temporal.feedforward=32",
        f"--task.data.root={root}", "--task.data.valid=train", "--task.data.size=32", "--task.data.workers=0",
        "--epochs=1", "--batch=2", "--micro_batch=1", "--device=cpu", "--precision=float32", "--log.tensorboard=false",
        "--log.progress=false",
    ]  # fmt: skip
    out = tmp_path / "run"
    assert train([name, *options, f"--out={out}"]) == 0
    assert [line["kind"] for line in lines(out)] == ["run", "train", "valid", "end"]


def test_two_learning_rates_milestones_and_a_warm_up_of_the_encoder(tmp_path):
    options = ["--schedule.name=multistep", "--schedule.warmup_epochs=0", "--epochs=4", "--optimizer.lr=1e-2",
        "--schedule.options={decay_milestones: [2, 3], decay_rate: 0.1}",
        "--task.encoder.lr=1e-3", "--task.encoder.warmup_epochs=1"]  # fmt: skip
    trainer = Trainer(parse("train", ["online", *SMALL, *options]), Processes(torch.device("cpu")))
    encoder = {id(its) for its in trainer.model.encoder.parameters()}
    assert trainer.steps_per_epoch == 5

    def rates(step: int) -> tuple[float, float]:
        trainer.learner.schedule.step_update(step)
        groups = trainer.learner.optimizer.param_groups
        its, others = ({g["lr"] for g in groups if (id(g["params"][0]) in encoder) == own} for own in (True, False))
        assert len(its) == len(others) == 1
        return its.pop(), others.pop()

    assert rates(0) == (0, 1e-2)
    assert rates(2) == pytest.approx((0.4e-3, 1e-2))
    assert rates(5) == pytest.approx((1e-3, 1e-2))
    assert rates(12) == pytest.approx((1e-4, 1e-3))
    assert rates(17) == pytest.approx((1e-5, 1e-4))


def test_the_loss_is_cross_entropy_of_clear_frames():
    logits = torch.randn(2, 5, 3)
    targets = torch.eye(4)[torch.tensor([[0, 1, 2, 3, 1], [3, 3, 0, 2, 2]])]  # the last column is ambiguous
    clear = targets[..., 3] == 0
    expected = F.cross_entropy(logits[clear], targets[clear].argmax(-1))
    torch.testing.assert_close(multi_label_loss(logits, targets), expected)
    both = targets.clone()
    both[0, 0, 1] = 1  # two actions at once: both are wanted
    more = -logits[0, 0].log_softmax(-1)[1] / clear.sum()
    torch.testing.assert_close(multi_label_loss(logits, both), expected + more)
    assert multi_label_loss(logits, torch.eye(4)[torch.full((2, 5), 3)]) == 0


def test_a_clip_is_augmented_as_one():
    options = OnlineActionOptions(data=Data(size=24), augment=Augment(color_jitter=0.3))
    frame = torch.randint(0, 256, (3, 30, 40), dtype=torch.uint8)
    transform = OfInput(train_transform(options))
    found = [transform(frame.expand(5, -1, -1, -1), None)[0] for _ in range(8)]
    assert all(clip.shape == (5, 3, 24, 24) and clip.dtype == torch.uint8 for clip in found)
    assert all(torch.equal(clip[0], other) for clip in found for other in clip[1:])
    assert len({clip.float().mean().item() for clip in found}) == 8  # of each its own
    straight = OfInput(eval_transform(Data(size=24, crop_pct=0.8)))(frame.expand(2, -1, -1, -1), None)[0]
    assert straight.shape == (2, 3, 24, 24)


def test_generated_videos_are_a_function_of_their_seed():
    first, again, other = (Generated(2, 40, 16, seed) for seed in (0, 0, 1))
    assert torch.equal(first.pixels[1], again.pixels[1])
    assert not torch.equal(first.pixels[1], other.pixels[1])
    for label, start, end in first.segments(0):
        assert first.targets(0)[int(start * 4) : int(end * 4), label].all()
    assert (first.targets(0).sum(1) == 1).all()


@pytest.mark.parametrize(
    "option, message",
    [
        ("--task.encoder.name=nothing", "task.encoder.name nothing with"),
        ("--task.encoder.name=torchvision/nothing", "task.encoder.name torchvision/nothing with"),
        ("--task.data.size=4", "task.data.size=4 does not fit task.encoder.name convnext_atto"),
        ("--task.encoder.tokens=2", "task.encoder.tokens=2.0 is not allowed; allowed: a number in (0, 1], or null"),
        ("--optimizer.layer_decay=0.9", "optimizer.layer_decay=0.9 is not allowed; allowed: null"),
        ("--task.window.work=0", "task.window.work=0 is not allowed; allowed: an integer at least 1"),
        ("--task.data.source=thumos", "classes.txt can't be read"),
        ("--task.encoder.weights=no.pt", "no.pt"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, capsys, option, message):
    assert train(["online", *SMALL, option, f"--out={tmp_path / 'run'}"]) in (1, 2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_commands_that_are_not_for_this_task_name_those_that_are(whole, tmp_path, capsys):
    assert main(["predict", str(whole), str(whole / "metrics.jsonl"), f"--out={tmp_path}"]) == 2
    assert "use torchsbp detect RUN VIDEO" in capsys.readouterr().err
    assert main(["export", str(whole), "--format=torch_export", f"--out={tmp_path / 'model.pt2'}"]) == 2
    assert "--format safetensors exports the weights" in capsys.readouterr().err


def test_sharding_is_refused(tmp_path):
    config = parse("train", ["online", *SMALL, "--parallel=fsdp", f"--out={tmp_path / 'run'}"])
    with pytest.raises(UsageError, match=r"parallel=fsdp does not go with task online_action"):
        Trainer(config, Processes(torch.device("cpu"), 0, 2))


def test_the_encoder_begins_from_weights_with_or_without_a_classifier(whole, tmp_path):
    import timm

    from torchsbp.train.online.encoder import Encoder, make_encoder

    options = {"depths": [1, 1, 1, 1], "dims": [8, 8, 8, 8], "patch_size": 4, "ls_init_value": 1.0}
    model = timm.create_model("convnext_atto", **options, num_classes=7)
    torch.save(model.state_dict(), tmp_path / "timm.pt")

    def begun(path: Path) -> dict[str, torch.Tensor]:
        config = Encoder(name="convnext_atto", options=options, weights=path)
        return make_encoder(config, 32, (0.5,) * 3, (0.5,) * 3, start=True).body.state_dict()

    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in begun(tmp_path / "timm.pt").items())
    ours = torch.load(whole / "checkpoints" / "best.pt", weights_only=True)["model"]
    found = begun(whole / "checkpoints" / "best.pt")
    assert all(torch.equal(value, ours[f"encoder.body.{name}"]) for name, value in found.items())
    with pytest.raises(UsageError, match=r"torchvision's weights as task.encoder.weights"):
        make_encoder(Encoder(name="torchvision/resnet18", pretrained=True), 32, (0.5,) * 3, (0.5,) * 3, start=True)


def test_gradients_through_all_frames_are_the_full_ones(whole, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    measure = importlib.import_module("frame_gradients").main
    measure([str(whole), "--batches=2", "--size=2", "--ratio=1"])
    first, *table = capsys.readouterr().out.splitlines()
    assert first.startswith("gradient of a frame's features: long memory ")
    assert [line.split("|")[2:4] for line in table[2:]] == [[" 1.00 ", " 1.00 "]] * 3
    measure([str(whole), "--batches=2", "--size=2", "--ratio=0.25"])
    assert " 1.00 " not in capsys.readouterr().out


@pytest.mark.slow
def test_sbp_learns_as_full_backprop_does_and_a_frozen_encoder_does_not(tmp_path):
    """The recipe: three minutes on a CPU."""
    found = {}
    for name, options in {"sbp": [], "full": FULL, "frozen": [*FULL, "--task.encoder.frozen=true"]}.items():
        out = tmp_path / name
        assert train(["online", "--log.progress=false", "--eval_every=14", *options, f"--out={out}"]) == 0
        found[name] = lines(out)[-2]["map"]
    assert min(found["sbp"], found["full"]) > 50
    assert found["full"] - found["sbp"] < 3
    assert found["sbp"] > found["frozen"] + 10

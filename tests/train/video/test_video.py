"""The video task: it trains, is killed and resumed, evaluated over views and reported; its data."""

import csv
import json
import re
from pathlib import Path
from shutil import rmtree

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import torchsbp
from torchsbp.cli.recipe import parse
from torchsbp.errors import DataError
from torchsbp.report import html, read
from torchsbp.sampling.recommended import NAMES
from torchsbp.train.data.lists import Epic, Listed, records
from torchsbp.train.distributed import Processes
from torchsbp.train.loop import Trainer

from ..runs import evaluate, final, lines, same, stopped_at, train
from .runs import SWIN, TINY, VIDEOMAE, VIT, VIVIT, VJEPA, listed, recipe


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("video")
    assert train([recipe(folder)]) == 0
    return folder / "run"


def trainer_of(folder: Path, **changes) -> Trainer:
    return Trainer(parse("train", [recipe(folder, **changes)]), Processes(torch.device("cpu")))


def test_it_trains_and_logs(whole):
    found = lines(whole)
    assert [line["kind"] for line in found] == ["run", "train", "valid", "train", "valid", "end"]
    assert {"loss", "top1", "top5", "unread", "short"} < set(found[2])
    assert (found[2]["unread"], found[2]["short"]) == (0, 0)
    assert found[1]["clips_per_s"] > 0


def test_killed_and_resumed_it_ends_the_same(whole, tmp_path):
    with stopped_at(3):
        train([recipe(tmp_path)])
    assert train([recipe(tmp_path), "--resume=auto"]) == 0
    assert same(final(whole), final(tmp_path / "run"))


def test_it_is_evaluated_and_reported(whole, capsys):
    assert evaluate([str(whole)]) == 0
    found = json.loads(capsys.readouterr().out)
    (line,) = [line for line in lines(whole) if line["kind"] == "valid" and line["step"] == found["step"]]
    assert all(found[name] == line[name] for name in ("loss", "top1", "top5"))
    page = html([read(whole)], "Motions")
    for text in ("top-1, %", "Confusion matrix", "anticlockwise", "Frames of a clip", "data:image/png"):
        assert text in page


def test_several_views_are_averaged(whole, capsys):
    assert evaluate([str(whole), "--task.data.views=[4, 3]", "--task.data.side=40"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 <= found["top1"] <= 100
    assert found["loss"] != next(line for line in lines(whole) if line["kind"] == "valid")["loss"]


def test_probabilities_of_views(tmp_path):
    """The mean over views of the softmax, computed by hand for one video."""
    trainer = trainer_of(tmp_path, task={"data": {"views": [2, 3], "side": 36}})
    task, model = trainer.task, trainer.model.eval()
    batch = task.prepare(task.collate([task.valid_data[0, 0], task.valid_data[0, 1]]), training=False)
    assert batch[0].shape == (2, 6, 3, 8, 32, 32)
    evaluator = task.evaluator()
    with torch.no_grad():
        evaluator.update(model, batch, 1)
        expected = model(batch[0][0]).softmax(1).mean(0)
    assert evaluator.result()["loss"] == pytest.approx(-float(expected[batch[1][0, 0]].log()), rel=1e-5)
    assert float(evaluator.sums[1]) == 1  # the second video only fills the batch


def test_two_learning_rates_and_half_an_epoch_of_warm_up(tmp_path):
    trainer = trainer_of(tmp_path, optimizer={"lr": 1e-2, "weight_decay": 0.1})
    groups = trainer.learner.optimizer.param_groups
    assert [(group["initial_lr"], group["weight_decay"]) for group in groups] == [
        (5e-3, 0.1), (5e-3, 0.0), (1e-2, 0.1), (1e-2, 0.0),
    ]  # fmt: skip
    sizes = [sum(its.numel() for its in group["params"]) for group in groups]
    assert sum(sizes) == sum(its.numel() for its in trainer.model.parameters())
    tables = [its for name, its in trainer.model.named_parameters() if name.endswith("bias_table")]
    assert all(any(its is table for its in groups[1]["params"]) for table in tables)
    schedule = trainer.learner.schedule
    rates = []
    for step in range(3):
        schedule.step_update(step)
        rates.append(groups[2]["lr"])
    assert (rates[0], rates[1]) == (0.0, pytest.approx(1e-2))  # one of the two updates of an epoch warms up
    assert rates[2] < rates[1]


@pytest.mark.parametrize("sampler", ["frames", "frames_jitter", "checkerboard", "grid", "random"])
@pytest.mark.parametrize("scope", ["branch", "block"])
def test_samplers_and_scopes(tmp_path, sampler, scope):
    trainer = trainer_of(tmp_path, sbp={"sampler": sampler, "scope": scope})
    trainer.model.train()
    loss = trainer.forward(0, trainer.task.prepare(next(trainer.batches()), training=True))["loss"]
    assert torch.isfinite(loss)
    kept = torchsbp.kept(trainer.model)
    assert list(kept) == [f"body.features.{stage}.0" for stage in (0, 2, 4)]  # stages 1, 2 and 2/3 of 3
    assert kept["body.features.0.0"].shape == (4, 4 * 8 * 8 // 2)
    if sampler.startswith("frames"):
        assert all(frame.unique().numel() == 2 for frame in kept["body.features.0.0"] // 64)


def test_blocks_of_the_paper():
    """Stages 1 and 2, the first 4 of 6 blocks of stage 3 (tiny), or 14 of 18 (base)."""
    for name, third in (("swin3d_t", 4), ("swin3d_b", 14)):
        from torchvision.models import get_model

        with torch.device("meta"):
            model = torchsbp.apply(get_model(name), keep_ratio=0.5, sampler="frames")
        sampled = [
            site.name for entry, _ in torchsbp.patching.apply.patched_entries(model) for site in entry.masks.sites
        ]
        expected = [f"features.{stage}.{i}" for stage, depth in ((0, 2), (2, 2), (4, third)) for i in range(depth)]
        assert sampled == expected


def test_channels_last_is_of_clips(tmp_path):
    trainer = trainer_of(tmp_path, channels_last=True)
    clips, *_ = trainer.task.prepare(next(trainer.batches()), training=True)
    assert clips.is_contiguous(memory_format=torch.channels_last_3d)
    assert trainer.model.body.patch_embed.proj.weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert torch.isfinite(trainer.forward(0, (clips, torch.zeros(4, 1, dtype=torch.long), []))["loss"])


FRAMES = {"keep_ratio": 0.5, "sampler": "frames"}
MODELS = {
    "frames of a ViT": ("vit_tiny_patch16_224", VIT, FRAMES),
    "tokens of a ViT": ("vit_tiny_patch16_224", VIT, {"keep_ratio": 0.5, "sampler": "grid", "per_sample": True}),
    "VideoMAE": ("transformers/VideoMAEForVideoClassification", VIDEOMAE, {"sampler": "frames_jitter"}),
    "V-JEPA 2": ("transformers/VJEPA2ForVideoClassification", VJEPA, {"sampler": "checkerboard"}),
    "ViViT": ("transformers/VivitForVideoClassification", VIVIT, {"sampler": "frames"}),
    "V-JEPA 2, plain": ("transformers/VJEPA2ForVideoClassification", VJEPA, {"preset": "none", "sampler": None}),
}


def recipe_of(folder: Path, model: str, options: dict, sbp: dict) -> str:
    task = {**TINY["task"], "model": {"name": model, "options": options}}
    changed = {**TINY, "task": task, "sbp": {**TINY["sbp"], **sbp}, "epochs": 1, "out": str(folder / "run")}
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(changed))
    return str(path)


@pytest.mark.parametrize("name", MODELS)
def test_models(tmp_path, name):
    model, options, sbp = MODELS[name]
    assert train([recipe_of(tmp_path, model, options, sbp)]) == 0
    assert lines(tmp_path / "run")[2]["loss"] > 0


def test_frames_of_a_vit_get_gradients_by_step(tmp_path):
    """Every frame is seen, half of them get gradients, others in the next step; in evaluation nothing is sampled."""
    path = recipe_of(tmp_path, "vit_tiny_patch16_224", VIT, FRAMES)
    trainer = Trainer(parse("train", [path]), Processes(torch.device("cpu")))
    clips = torch.rand(2, 3, 8, 32, 32)
    touched = []
    for step in range(8):
        trainer.task.set_step(trainer.model, step)
        video = clips.clone().requires_grad_()
        trainer.model.train()(video).sum().backward()
        touched.append(tuple((video.grad[0].abs().sum((0, 2, 3)) > 0).tolist()))
        assert sum(touched[-1]) == 4
    assert len(set(touched)) > 1
    torch.testing.assert_close(trainer.model(clips), trainer.model.eval()(clips))


def test_options_for_tokens_are_refused_where_frames_are_sampled(tmp_path, capsys):
    path = recipe_of(tmp_path, "vit_tiny_patch16_224", VIT, {**FRAMES, "attention": "qkv"})
    assert train([path]) != 0
    assert "sbp.attention is about tokens within frames: choose a sampler of positions" in capsys.readouterr().err


@pytest.mark.parametrize("preset", NAMES)
def test_a_share_of_frames_is_a_number(tmp_path, capsys, preset):
    """A family's is one of positions."""
    path = recipe_of(tmp_path, "vit_tiny_patch16_224", VIT, {"preset": preset, "sampler": "frames"})
    assert train([path]) == 2
    message = f"sbp.keep_ratio='{preset}' suits a model's family, and here is none; give a number in (0, 1]"
    assert message in capsys.readouterr().err


def test_compiled_the_encoder_of_frames_is_read_once_for_each_number_of_them(tmp_path):
    """Not once for each step; evaluation is not compiled, and sees as many frames at a time as it is told."""
    path = recipe_of(tmp_path, "vit_tiny_patch16_224", VIT, FRAMES)
    trainer = Trainer(parse("train", [path, "--task.model.chunk=4"]), Processes(torch.device("cpu")))
    graphs, seen, model = [], [], trainer.model.train()

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model.compile(backend=count)
    for step in range(4):
        trainer.task.set_step(model, step)
        model(torch.rand(2, 3, 8, 32, 32)).sum().backward()
    assert len(graphs) == 2  # 8 frames with gradients; 4 without, twice
    forward = model.body.encoder.forward
    model.body.encoder.forward = lambda frames: seen.append(len(frames)) or forward(frames)
    with torch.no_grad():
        model.eval()(torch.rand(2, 3, 8, 32, 32))
    assert seen == [4, 4, 4, 4]
    assert len(graphs) == 2


def test_lists_of_videos_and_what_cannot_be_read(tmp_path):
    root = listed(tmp_path / "data")
    (root / "train 3.npy").write_bytes(b"broken")
    (root / "val 2.npy").unlink()
    np.save(root / "train 1.npy", np.load(root / "train 1.npy")[:5])
    data = {"source": "list", "root": str(root)}
    assert train([recipe(tmp_path, task={"data": data}, epochs=3, batch=4)]) == 0
    found = [line for line in lines(tmp_path / "run") if line["kind"] == "valid"][-1]
    assert (found["unread"], found["short"]) == (2, 1)
    page = html([read(tmp_path / "run")], "List")
    for text in (
        "train 3.npy",
        "val 2.npy",
        "train 1.npy: 5 frames, a clip spans 15",
        "Videos that can&#x27;t be read",
    ):
        assert text in page
    total = page.split("Accuracy by class")[1].split("</table>")[0]
    assert total.count("<td>0</td>") == 1  # the class of the video that is missing


def test_resumed_it_knows_what_could_not_be_read_before(tmp_path):
    root = listed(tmp_path / "data")
    (root / "train 3.npy").unlink()
    np.save(root / "train 1.npy", np.load(root / "train 1.npy")[:5])
    changes = {"task": {"data": {"source": "list", "root": str(root)}}, "epochs": 1, "batch": 2, "micro_batch": 2}
    assert train([recipe(tmp_path / "whole", **changes)]) == 0
    with stopped_at(3):
        train([recipe(tmp_path / "parts", **changes)])
    assert train([recipe(tmp_path / "parts", **changes), "--resume=auto"]) == 0
    whole, parts = (lines(tmp_path / name / "run")[-2] for name in ("whole", "parts"))
    assert (whole["unread"], whole["short"]) == (parts["unread"], parts["short"]) == (1, 1)


def test_the_report_shows_a_video_that_can_be_read(tmp_path):
    root = listed(tmp_path / "data")
    (root / "val 0.npy").unlink()
    trainer = trainer_of(tmp_path, task={"data": {"source": "list", "root": str(root)}})
    task, evaluator = trainer.task, trainer.task.evaluator()
    batch = task.prepare(task.collate([task.valid_data[0, number] for number in range(2)]), training=False)
    evaluator.update(trainer.model.eval(), batch, 2)
    assert torch.equal(evaluator.first, batch[0][1, 0])


def test_without_any_video_it_says_so(tmp_path, capsys):
    root = listed(tmp_path / "data")
    for path in root.glob("train *.npy"):
        path.write_bytes(b"broken")
    assert train([recipe(tmp_path, task={"data": {"source": "list", "root": str(root)}})]) == 1
    assert "100 videos in a row: video" in capsys.readouterr().err
    for path in root.glob("train *.npy"):
        path.unlink()
    assert train([recipe(tmp_path / "b", task={"data": {"source": "list", "root": str(root)}})]) == 1
    assert "none of 8 videos of" in capsys.readouterr().err


def test_videos_are_looked_for_in_all_of_a_list(tmp_path):
    """The first of 300 are missing: such as those of one class, in a sorted list."""
    root = listed(tmp_path / "data")
    gone = [f"gone {number}.npy 0" for number in range(150)]
    (root / "half.txt").write_text("\n".join([*gone, *["train 0.npy 1"] * 150]))
    assert len(Listed(root, "half.txt").labels) == 300
    (root / "gone.txt").write_text("\n".join(gone))
    with pytest.raises(
        DataError, match=r"none of 75 videos of .*gone.txt that were looked for exist, such as .*gone 0"
    ):
        Listed(root, "gone.txt")


def epic(root: Path) -> Path:
    """Two participants, each with one video of two actions, as frames in a folder and as an array."""
    from PIL import Image

    root.mkdir()
    for head, names in (("verb", ("take", "put")), ("noun", ("pan", "plate", "knife"))):
        with (root / f"EPIC_{head}_classes.csv").open("w", newline="") as file:
            csv.writer(file).writerows([(f"{head}_id", "class_key"), *enumerate(names)])
    columns = ("uid", "participant_id", "video_id", "start_frame", "stop_frame", "verb_class", "noun_class")
    rows = []
    for participant, first in (("P01", 0), ("P26", 100)):
        folder = root / participant / f"{participant}_01"
        folder.mkdir(parents=True)
        for number in range(1, 25):
            Image.new("RGB", (48, 40), (first + number,) * 3).save(folder / f"frame_{number:010d}.png")
        rows += [(0, participant, folder.name, 3, 22, 0, 2), (1, participant, folder.name, 20, 40, 1, 0)]
    with (root / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return root


def test_a_class_without_a_name_is_refused_with_its_line(tmp_path):
    root = listed(tmp_path / "data")
    (root / "bad.txt").write_text("\ntrain 0.npy 7\n\ntrain 1.npy 8\n")
    with pytest.raises(DataError) as found:
        Listed(root, "bad.txt")
    assert str(found.value) == f"{root / 'bad.txt'}:4 has class 8; 8 have names: 0 to 7"
    root = epic(tmp_path / "epic")
    path = root / "labels.csv"
    path.write_text(path.read_text().replace("P26_01,20,40,1,0", "P26_01,20,40,1,3"))
    with pytest.raises(DataError) as found:
        Epic(root, "labels.csv", ["P01"], training=True)
    assert str(found.value) == f"{path}:5 has noun 3; 3 have names: 0 to 2"


def test_arrays_of_epic_kitchens_are_found(tmp_path):
    root = epic(tmp_path / "data")
    rmtree(root / "P01" / "P01_01")
    np.save(root / "P01" / "P01_01.npy", np.arange(24, dtype=np.uint8)[:, None, None, None].repeat(3, 3))
    videos = Epic(root, "labels.csv", ["P26"], training=True)
    with videos.open(0) as video:
        assert video.read([0, 19]).flatten(1)[:, 0].tolist() == [2, 21]  # frames 3 to 22, counted from 1


def test_an_action_that_begins_at_0_begins_with_the_first_frame(tmp_path):
    root = epic(tmp_path / "data")
    path = root / "labels.csv"
    path.write_text(path.read_text().replace("P01_01,3,22", "P01_01,0,22"))
    with Epic(root, "labels.csv", ["P26"], training=True).open(0) as video:
        assert len(video) == 22
        assert video.read([0, 21])[:, 0, 0, 0].tolist() == [1, 22]


@pytest.mark.parametrize("line, told", [("2,P01,P01_01,5", "TypeError"), ("2,P01,P01_01,5,x,0,0", "ValueError")])
def test_a_broken_line_of_annotations_is_told(tmp_path, line, told):
    root = epic(tmp_path / "data")
    path = root / "labels.csv"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=rf"labels.csv:6 is no action of Epic-Kitchens-55: {told}"):
        Epic(root, "labels.csv", ["P26"], training=True)
    path.write_text(path.read_text() + f'"{"never closed" * 11_000}')
    with pytest.raises(DataError, match=r"labels.csv can't be read: field larger than field limit"):
        list(records(path))


def test_batch_norms_under_sampled_frames_are_refused_with_the_option_that_freezes_them(tmp_path, capsys):
    path = recipe_of(tmp_path, "resnet18", {}, FRAMES)
    assert train([path]) == 2
    told = capsys.readouterr().err
    assert "bn1 is a batch norm in training mode" in told
    (frozen,) = re.findall(r"torchsbp train: --freeze '(.*?)'\)", told)
    assert json.loads(frozen)[:3] == ["*.bn1", "*.bn2", "*.layer2.0.downsample.1"]
    assert train([path, f"--freeze={frozen}", f"--out={tmp_path / 'frozen'}"]) == 0


def test_epic_kitchens_has_two_heads(tmp_path):
    data = {"source": "epic", "root": str(epic(tmp_path / "data")), "train": "labels.csv", "valid": "labels.csv"}
    assert train([recipe(tmp_path, task={"data": data}, epochs=1, batch=2, micro_batch=2)]) == 0
    found = lines(tmp_path / "run")
    assert {"loss", "loss_verb", "loss_noun"} < set(found[1])
    assert {"loss", "top1", "verb_top1", "noun_top1"} < set(found[2])
    page = html([read(tmp_path / "run")], "Epic")
    assert "Verb: Confusion matrix" in page
    assert "Noun: Confusion matrix" in page


def test_actions_of_epic_kitchens_are_stretches(tmp_path):
    data = {"source": "epic", "root": str(epic(tmp_path / "data")), "train": "labels.csv", "valid": "labels.csv"}
    task = trainer_of(tmp_path, task={"data": data}, batch=2, micro_batch=2).task
    clips, target = task.valid_data[0, 0]
    assert target.labels.tolist() == [0, 2]
    assert clips[0, 0, :, 16, 16].tolist() == [106 + 2 * i for i in range(8)]  # of frames 3 to 22, in the middle
    clips, target = task.valid_data[0, 1]
    assert clips[0, 0, :, 16, 16].tolist() == [120 + 2 * i % 5 for i in range(8)]  # 5 of its frames are there
    assert [note.kind for note in target.notes] == ["short"]


@pytest.mark.parametrize(
    "change, text",
    [
        ({"model": {"name": "swin3d_x"}}, "task.model.name swin3d_x"),
        ({"model": {"name": "transformers/ViTModel"}}, "transformers/VideoMAEForVideoClassification, "),
        ({"model": {"name": "transformers/AutoModelForVideoClassification"}}, "known: transformers/TimesformerFor"),
        (
            {
                "model": {
                    "name": "transformers/VideoMAEForVideoClassification",
                    "drop_path": 0,
                    "options": {"hiden": 24},
                }
            },
            "VideoMAEConfig of transformers has no ",
        ),
        ({"model": {"options": {**SWIN, "wide": 3}}}, "unexpected keyword argument 'wide'"),
        ({"data": {"side": 16}}, "task.data.side=16 is not allowed; allowed: at least task.data.size=32"),
        ({"augment": {"scale": [0.9, 0.5]}}, "the first not above the second"),
        ({"model": {"time_layers": 1}}, "time_layers=1 is not allowed; allowed: 0 for swin3d_t, which sees time"),
        ({"data": {"mean": [0.5]}}, "need one number per channel, 3"),
    ],
)
def test_what_is_not_possible_is_said(tmp_path, capsys, change, text):
    assert train([recipe(tmp_path, task=change)]) == 2
    assert text in capsys.readouterr().err


def test_weights_begin_a_model(whole, tmp_path):
    """Of ours whole, and without the classifier for other classes."""
    weights = load_file(whole / "model.safetensors")
    task = {"model": {"weights": str(whole / "model.safetensors")}}
    assert same(dict(trainer_of(tmp_path, task=task).model.state_dict()), weights)
    state = trainer_of(tmp_path, task={"model": {**task["model"], "new_head": True}}).model.state_dict()
    equal = {name for name in weights if torch.equal(state[name], weights[name])}
    assert set(weights) - equal == {"head.weight", "head.bias"}

"""The detection task: trains, is killed and resumed, evaluated and reported; accumulation, processes, precision."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from PIL import Image

import torchsbp
from torchsbp.cli.main import main
from torchsbp.cli.recipe import parse
from torchsbp.cli.trained import without_training
from torchsbp.errors import CheckpointError, UsageError
from torchsbp.report import html, read
from torchsbp.train.data.coco_check import check
from torchsbp.train.detection.evaluate import NUMBERS
from torchsbp.train.distributed import Processes, all_sum, processes
from torchsbp.train.loop import Trainer
from torchsbp.train.runs.stored import read_stored
from torchsbp.train.runs.weights import read_weights
from torchsbp.train.tasks.detection import Detection, DetectionOptions

from .detection.runs import coco_data, coco_folder, recipe
from .runs import evaluate, final, lines, same, stopped_at, train

CASCADE = {"task": {"model": {"kind": "cascade_mask_rcnn"}, "lean": {"rpn": True, "recompute": True}}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("detection")
    assert train([recipe(folder)]) == 0
    return folder / "run"


def test_it_trains_and_logs_every_loss_and_all_numbers(whole):
    found = lines(whole)
    assert [line["kind"] for line in found] == ["run", "train", "valid", "train", "train", "valid", "end"]
    names = {name for name in found[1] if name.startswith("loss_")}
    assert names == {f"loss_{part}" for part in ("objectness", "proposals", "class", "box", "mask")}
    numbers = {f"{kind}_{number}" for kind in ("box", "mask") for number in NUMBERS}
    assert numbers < set(found[2])
    assert found[0]["task"]["notes"] == [
        "shapes: 12 images; not trained with: nothing",
        "shapes: 3 images to evaluate with; of note: nothing",
    ]


def test_killed_and_resumed_it_ends_the_same(whole, tmp_path):
    with stopped_at(4):
        train([recipe(tmp_path)])
    assert train([recipe(tmp_path), "--resume=auto"]) == 0
    assert same(final(whole), final(tmp_path / "run"))
    assert without_memory(whole) == without_memory(tmp_path / "run")


def without_memory(out: Path) -> list[dict]:
    """It is that of the first forward of a process, whose images are others after resuming."""
    return [{name: value for name, value in line.items() if name != "memory_mib"} for line in lines(out)]


def test_it_is_evaluated_and_reported(whole, capsys):
    assert evaluate([str(whole)]) == 0
    found = json.loads(capsys.readouterr().out)
    (line,) = [line for line in lines(whole) if line["kind"] == "valid" and line["step"] == found["step"]]
    assert all(found[name] == line[name] for name in line if name.startswith(("box_", "mask_")))
    page = html([read(whole)], "Shapes")
    for text in ("box AP, %", "Box average precision", "Average precision by class", "Predictions", "data:image/png"):
        assert text in page


def test_runs_of_earlier_versions_are_evaluated(whole):
    """What they say of saving less in training is not needed."""
    config = json.loads((whole / "metrics.jsonl").read_text().splitlines()[0])["config"]
    config["task"]["lean"] = {"rpn": True, "pyramid": 0.5}
    found = parse("eval", ["--config", json.dumps(without_training(config))])
    assert not found.task.lean.rpn
    assert found.task.model.width == 32


def test_a_cascade_trains_in_bfloat16_from_coco_files(tmp_path):
    data = {**coco_data(coco_folder(tmp_path / "data")), "buckets": [[96, 96]]}
    options = {"task": {**CASCADE["task"], "data": data}, "epochs": 1, "precision": "bfloat16"}
    options["schedule"] = {"warmup_steps": 1}
    assert train([recipe(tmp_path, **options)]) == 0
    found = lines(tmp_path / "run")
    names = {name for name in found[1] if name.startswith("loss_")}
    parts = {f"loss_{part}{stage}" for part in ("class", "box", "mask") for stage in (1, 2, 3)}
    assert names == {"loss_objectness", "loss_proposals", *parts}
    assert all(abs(found[1][name]) < 100 for name in names)


def test_boxes_alone(tmp_path):
    assert train([recipe(tmp_path, task={"model": {"masks": False}}, epochs=1)]) == 0
    found = lines(tmp_path / "run")
    assert "loss_mask" not in found[1]
    assert not any(name.startswith("mask_") for name in found[2])


@pytest.mark.parametrize("buckets, filled", [([], "more than half"), ([[192, 192]], "less than half")])
def test_kept_positions_lie_in_the_images(tmp_path, buckets, filled):
    """Of every sampled block. Of an image that fills less of the padded size than the kept share, all of them are kept,
    and the rest is padding: every image of a batch keeps as many."""
    sbp = {"preset": "paper", "attention": "query"}
    options = [recipe(tmp_path, batch=2, sbp=sbp), f"--task.data.buckets={buckets}", "--sbp.keep_ratio=0.5"]
    trainer = Trainer(parse("train", options), Processes(torch.device("cpu")))
    trainer.model.train()
    batch = trainer.task.prepare(next(trainer.batches()), training=True)
    trainer.forward(0, batch)
    height, width = batch.images.shape[-2:]
    assert (batch.sizes != torch.tensor([height, width])).any()
    blocks = torchsbp.kept(trainer.model)
    assert [name.removeprefix("backbone.body.stages_") for name in blocks] == [
        "0.blocks.0", "1.downsample", "1.blocks.0", "2.downsample", "2.blocks.0"
    ]  # fmt: skip
    for name, kept in blocks.items():
        stride = 4 << int(name.split("stages_")[1][0])
        columns = width // stride
        inside = (stride * (kept // columns) < batch.sizes[:, :1]) & (stride * (kept % columns) < batch.sizes[:, 1:])
        of_image = (-(-batch.sizes // stride)).prod(1)
        assert kept.shape[1] == round(0.5 * (height // stride) * columns)
        assert inside.sum(1).tolist() == of_image.clamp(max=kept.shape[1]).tolist(), name
        assert (of_image >= kept.shape[1]).all() == (filled == "more than half")


def test_images_are_normalised_and_padding_is_zero(tmp_path):
    trainer = Trainer(parse("train", [recipe(tmp_path)]), Processes(torch.device("cpu")))
    batch = next(trainer.batches())
    ready = trainer.task.prepare(batch, training=True)
    assert ready.sizes is batch.sizes  # on the CPU, where the heads read them
    for image, pixels, (height, width) in zip(ready.images, batch.images, batch.sizes.tolist(), strict=True):
        assert not image[:, height:].any()
        assert not image[:, :, width:].any()
        assert float(image[1, 0, 0]) == pytest.approx((float(pixels[1, 0, 0]) / 255 - 0.456) / 0.224, abs=1e-5)


def worker(rank: int, path: str) -> None:
    """The gradient of both processes together, and the mean of each one's own; then a run, and one with FSDP2."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    start, store = dist.init_process_group, f"file://{Path(path).parent}/store"
    dist.init_process_group = lambda backend: start(backend, init_method=store, rank=rank, world_size=2)
    with processes("cpu") as here:
        trainer = Trainer(parse("train", [path]), here)
        trainer.model.train()
        batch = trainer.task.prepare(next(trainer.batches()), training=True)
        found = []
        for model in (trainer.model, trainer.learner.parallel):
            torch.manual_seed(rank)
            torchsbp.set_step(trainer.model, 0)
            torch.stack([*trainer.task.loss(model, batch).values()]).sum().backward()
            found.append({name: p.grad.clone() for name, p in trainer.model.named_parameters()})
            trainer.model.zero_grad()
        own, both = found
        kept = next(iter(torchsbp.kept(trainer.model).values()))
        result = {"mean": {name: all_sum(g) / 2 for name, g in own.items()}, "both": both, "own": own, "kept": kept}
        Trainer(parse("train", [path, "--epochs=1"]), here).fit()
        Trainer(parse("train", [path, "--epochs=1", "--parallel=fsdp", f"--out={path}.fsdp"]), here).fit()
    torch.save(result, f"{path}.{rank}")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    path = recipe(tmp_path_factory.mktemp("two"), schedule={"warmup_steps": 1})
    mp.start_processes(worker, (path,), nprocs=2, start_method="forkserver")
    return Path(path).parent / "run", [torch.load(f"{path}.{rank}") for rank in range(2)]


def test_two_processes_have_the_mean_of_their_gradients(two):
    first, second = two[1]
    for name, gradient in first["mean"].items():
        torch.testing.assert_close(first["both"][name], gradient, rtol=1e-5, atol=1e-7, msg=name)
        assert torch.equal(first["both"][name], second["both"][name])
    assert any(not torch.equal(first["own"][name], second["own"][name]) for name in first["own"])
    assert not torch.equal(first["kept"], second["kept"])


def test_two_processes_train_and_evaluate_every_image_once(two, capsys):
    out, _ = two
    (valid,) = [line for line in lines(out) if line["kind"] == "valid"]
    assert evaluate([str(out)]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert all(alone[name] == pytest.approx(valid[name]) for name in valid if name.startswith(("box_", "mask_")))


def test_two_processes_that_share_the_parameters_train_alike(two):
    out, _ = two
    both = [lines(out), lines(out.parent / "recipe.yaml.fsdp")]
    losses, sharded = ([line["loss"] for line in its if line["kind"] == "train"] for its in both)
    assert len(losses) > 1
    assert sharded == pytest.approx(losses, rel=1e-4)


def test_synchronised_norms_are_refused_on_several_cpus(tmp_path):
    options = {"task": {"model": {"kind": "cascade_mask_rcnn", "norm": "batch"}}}
    config = parse("train", [recipe(tmp_path, **options)])
    with pytest.raises(UsageError, match=r"for GPUs alone; these are 2 processes on CPUs.* task\.model\.norm=group"):
        Trainer(config, Processes(torch.device("cpu"), 0, 2))
    Trainer(config, Processes(torch.device("cpu")))


def test_sizes_without_buckets_are_not_compiled(whole, tmp_path, capsys):
    assert train([recipe(tmp_path), "--compile=true"]) == 2
    assert evaluate([str(whole), "--compile=true"]) == 2
    assert capsys.readouterr().err.count("compile needs task.data.buckets, which are empty") == 2


def test_a_shorter_run_than_its_warm_up_is_refused(tmp_path, capsys):
    assert train([recipe(tmp_path), "--schedule.warmup_steps=6"]) == 2
    assert (
        "schedule.warmup_steps=6 is not allowed; allowed: fewer than all updates of the run, 6"
        in capsys.readouterr().err
    )


def test_warm_up_counts_updates_and_milestones_epochs(tmp_path):
    options = {
        "schedule": {
            "name": "multistep", "warmup_epochs": 0, "warmup_steps": 4, "warmup_lr": 1e-6,
            "options": {"decay_milestones": [3, 5], "decay_rate": 0.1},
        },
        "epochs": 6, "optimizer": {"layer_decay": None},
    }  # fmt: skip
    trainer = Trainer(parse("train", [recipe(tmp_path, **options)]), Processes(torch.device("cpu")))
    rates = []
    for step in range(18):  # three updates are an epoch
        trainer.learner.schedule.step_update(step)
        rates.append(trainer.learner.optimizer.param_groups[0]["lr"])
    warm = [1e-6 + step / 4 * (1e-3 - 1e-6) for step in range(4)]
    assert rates[:4] == pytest.approx(warm)
    assert rates[4:8] == pytest.approx([1e-3] * 4)
    assert rates[9:14] == pytest.approx([1e-4] * 5)
    assert rates[15:] == pytest.approx([1e-5] * 3)


def test_predict_writes_pictures_and_cocos_json(whole, tmp_path, capsys):
    """Without data of the run; its json is one that COCO's tools and we read."""
    folder = coco_folder(tmp_path / "data", 3) / "val"
    (folder / "broken.png").write_bytes(b"no picture")
    out = tmp_path / "found"
    assert main(["predict", str(whole), str(folder), f"--out={out}"]) == 1
    assert "broken.png" in capsys.readouterr().err
    (path,) = out.glob("*.json")
    content = json.loads(path.read_text())
    assert [its["name"] for its in content["categories"]] == ["disc", "rectangle", "triangle"]
    assert [Path(its["file_name"]).name for its in content["images"]] == ["0.png", "1.png", "2.png"]
    assert all(0.05 < its["score"] <= 1 for its in content["annotations"])
    check(content, str(path), masks=True)
    rows = next(out.glob("*.csv")).read_text().splitlines()
    assert rows[0].endswith("class,score,x,y,width,height")
    assert len(rows) == 1 + len(content["annotations"])
    assert [its["id"] for its in content["categories"]] == [1, 2, 3]


def test_a_run_is_what_another_begins_from(whole, tmp_path):
    """By its folder: its best checkpoint, or its last weights."""
    for name, file in (("best", "checkpoints/best.pt"), ("last", "model.safetensors")):
        folder = tmp_path / name
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_bytes((whole / file).read_bytes())
        options = parse("train", [recipe(tmp_path), f"--task.model.weights={folder}"])
        begun = Trainer(options, Processes(torch.device("cpu"))).model.state_dict()
        weights = read_weights(whole / file)
        body = [name for name in begun if name.startswith("backbone.body.")]
        assert len(body) > 20
        assert all(torch.equal(begun[name], weights[name]) for name in body)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*empty/checkpoints/best\.pt"):
        read_weights(tmp_path / "empty")


def test_category_ids_of_the_data_are_stored_and_predicted(tmp_path):
    """Shapes with ids with holes, in another order than the names; weights of older runs have ids 1, 2, 3."""
    root = coco_folder(tmp_path / "data")
    ids = {1: 90, 2: 18, 3: 44}
    for file in (root / "annotations").iterdir():
        content = json.loads(file.read_text())
        for its in content["categories"]:
            its["id"] = ids[its["id"]]
        for its in content["annotations"]:
            its["category_id"] = ids[its["category_id"]]
        file.write_text(json.dumps(content))
    options = {"task": {"data": coco_data(root)}, "epochs": 1, "schedule": {"warmup_steps": 1}}
    assert train([recipe(tmp_path, **options)]) == 0
    for path in (tmp_path / "run", tmp_path / "run" / "model.safetensors"):
        about = read_stored(path, None).about
        assert json.loads(about["category_ids"]) == [18, 44, 90]
        assert json.loads(about["classes"]) == ["rectangle", "triangle", "disc"]
    out = tmp_path / "found"
    assert main(["predict", str(tmp_path / "run"), str(root / "val" / "0.png"), f"--out={out}"]) == 0
    content = json.loads((out / "predictions.json").read_text())
    names = {90: "disc", 18: "rectangle", 44: "triangle"}
    assert {its["id"]: its["name"] for its in content["categories"]} == names
    task = Detection.trained(DetectionOptions("detection"), 0, {"classes": about["classes"]})
    assert task.category_ids == [1, 2, 3]


def test_other_classes_are_refused_at_the_start_and_by_eval(whole, tmp_path, capsys):
    root = coco_folder(tmp_path / "data", 2)
    path = root / "annotations" / "val.json"
    path.write_text(path.read_text().replace('"disc"', '"ball"'))
    options = [
        "--task.data.source=coco",
        f"--task.data.root={root}",
        "--task.data.valid=val",
        "--task.data.train=train",
    ]
    options += [
        f"--task.data.{part}_json=annotations/{file}.json" for part, file in (("train", "train"), ("valid", "val"))
    ]
    assert evaluate([str(whole), *options]) == 1
    assert train([recipe(tmp_path), *options]) == 1
    told = capsys.readouterr().err
    assert told.count("has the categories ball, rectangle, triangle; those of training are disc, rectangle, tri") == 2


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["shapes", "shapes_sbp"])
def test_shapes_are_learned_in_two_minutes(tmp_path, recipe):
    """The shipped recipes on half of their images: a quarter of their updates. AP50 of boxes was 39.1 and 38.1; a model
    that finds nothing has 0."""
    short = ["--task.data.count=320", "--epochs=4", "--eval_every=4", "--log.progress=false"]
    assert train([recipe, f"--out={tmp_path / 'run'}", *short]) == 0
    valid = lines(tmp_path / "run")[-2]
    assert valid["box_ap50"] > 35
    assert valid["mask_ap50"] > 35


def test_losses_fall_within_a_few_updates(tmp_path):
    """On the same four images."""
    options = {"task": {"data": {"count": 4}, "augment": {"short": [64], "hflip": 0.0}, "model": {"drop_path": 0.0}}}
    options |= {"epochs": 25, "micro_batch": 4, "optimizer": {"lr": 3e-3, "layer_decay": None}, "eval_every": 25}
    assert train([recipe(tmp_path, **options), "--log.every_steps=5", "--checkpoint.every_steps=null"]) == 0
    losses = [line["loss"] for line in lines(tmp_path / "run") if line["kind"] == "train"]
    assert losses[-1] < 0.6 * losses[0]


def test_truncated_images_end_a_run_or_are_counted(tmp_path, capsys):
    root = coco_folder(tmp_path / "data")
    path = root / "train" / "3.png"
    path.write_bytes(path.read_bytes()[:2000])
    options = {"task": {"data": coco_data(root)}, "epochs": 1, "schedule": {"warmup_steps": 1}}
    assert train([recipe(tmp_path, **options)]) == 1
    assert "image 3, 3.png, of " in capsys.readouterr().err
    assert train([recipe(tmp_path, **options), "--task.data.broken=1", f"--out={tmp_path / 'other'}"]) == 0
    assert "skipped, 1 of at most 1 (task.data.broken)" in capsys.readouterr().err


def test_truncated_images_are_left_out_of_evaluation_with_their_objects(tmp_path, capsys):
    """By train and by eval, whose numbers are those of data without them."""
    root = coco_folder(tmp_path / "data")
    path, file = root / "val" / "0.png", root / "annotations" / "val.json"
    path.write_bytes(path.read_bytes()[:2000])
    options = {"task": {"data": coco_data(root)}, "epochs": 1, "schedule": {"warmup_steps": 1}}
    out, content = tmp_path / "run", json.loads(file.read_text())
    objects = [its for its in content["annotations"] if its["image_id"] == 0]
    assert train([recipe(tmp_path, **options), "--task.data.broken=1"]) == 0
    assert f"image 0, 0.png, of {file} can't be read: " in capsys.readouterr().err
    (valid,) = [line for line in lines(out) if line["kind"] == "valid"]
    assert (valid["images_left_out"], valid["objects_left_out"], len(valid["broken"])) == (1, len(objects), 1)
    assert "Samples that can&#x27;t be read" in html([read(out)], "Shapes")
    assert evaluate([str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    content["images"] = [its for its in content["images"] if its["id"] != 0]
    content["annotations"] = [its for its in content["annotations"] if its["image_id"] != 0]
    file.write_text(json.dumps(content))
    assert evaluate([str(out)]) == 0
    without = json.loads(capsys.readouterr().out)
    numbers = [name for name in without if name.startswith(("box_", "mask_"))]
    assert len(numbers) == 24
    assert [found[name] for name in numbers] == [valid[name] for name in numbers] == [without[name] for name in numbers]


def test_an_image_that_would_vanish_is_named_before_training_and_by_predict(whole, tmp_path, capsys):
    root = coco_folder(tmp_path / "data")
    file = root / "annotations" / "val.json"
    content = json.loads(file.read_text())
    content["images"][2] |= {"width": 400, "height": 4}
    file.write_text(json.dumps(content))
    path = root / "val" / "2.png"
    Image.new("RGB", (400, 4)).save(path)
    reason = "4 × 400 pixels are too thin: with a longer side of 96 (task.augment.long) the shorter one would vanish"
    assert train([recipe(tmp_path, task={"data": coco_data(root)})]) == 1
    assert f"image 2, 2.png, of {file}: {reason}" in capsys.readouterr().err
    assert main(["predict", str(whole), str(path), f"--out={tmp_path / 'found'}"]) == 1
    assert f"{path}: {reason}" in capsys.readouterr().err


def test_a_mask_of_validation_that_is_none_is_refused_before_training(tmp_path, capsys):
    root = coco_folder(tmp_path / "data")
    file = root / "annotations" / "val.json"
    content = json.loads(file.read_text())
    image = content["images"][0]
    content["annotations"][0]["segmentation"] = {"size": [image["height"], image["width"]], "counts": "xyz"}
    file.write_text(json.dumps(content))
    assert train([recipe(tmp_path, task={"data": coco_data(root)})]) == 1
    assert f"annotation 1 of {file}: its mask can't be decoded: " in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()

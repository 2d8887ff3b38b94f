"""Tiny runs of the detection task: generated shapes, a ConvNeXt 8 to 20 channels wide; the same as files."""

import json
from pathlib import Path
from typing import Any

from torchsbp.train.data.shapes import shapes

from ..runs import merged
from .detectors import TINY as BACKBONE

TINY: dict[str, Any] = {
    "task": {
        "name": "detection",
        "model": {
            "name": "convnext_tiny", "options": {**BACKBONE, "depths": [1, 1, 2, 1], "dims": [8, 12, 16, 20]},
            "drop_path": 0.1, "width": 32, "hidden": 16, "proposals": 50, "sampled": 16, "norm": "group",
            "anchor_scale": 6,
        },
        "data": {"source": "shapes", "count": 12, "workers": 0},
        "augment": {"short": [64, 80], "long": 96, "eval_short": 64},
    },
    "sbp": {"preset": "fast"},
    "epochs": 2,
    "batch": 4,
    "micro_batch": 2,
    "optimizer": {"lr": 1e-3, "layer_decay": 0.9, "clip_norm": 5.0},
    "schedule": {"warmup_epochs": 0, "warmup_steps": 2},
    "precision": "float32",
    "device": "cpu",
    "checkpoint": {"every_steps": 1},
    "log": {"every_steps": 2, "progress": False},
}  # fmt: skip


def recipe(folder: Path, **changes: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(merged({**TINY, "out": str(folder / "run")}, changes)))
    return str(path)


def coco_data(root: Path) -> dict[str, Any]:
    """Options for shapes in that folder."""
    parts = {"train": "train", "train_json": "annotations/train.json", "valid": "val"}
    return {"source": "coco", "root": str(root), **parts, "valid_json": "annotations/val.json"}


def coco_folder(root: Path, count: int = 8) -> Path:
    """Shapes in COCO's layout."""
    (root / "annotations").mkdir(parents=True)
    for part in ("train", "val"):
        source = shapes(count, part == "train", True)
        content = json.loads(json.dumps(source.content))
        (root / part).mkdir()
        for image, (picture, _) in zip(content["images"], (source[i] for i in range(count)), strict=True):
            image["file_name"] = f"{image['id']}.png"
            picture.save(root / part / image["file_name"])
        (root / "annotations" / f"{part}.json").write_text(json.dumps(content))
    return root

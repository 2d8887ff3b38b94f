"""Tiny runs of the video task: a Video Swin 8 to 16 channels wide on generated clips; the same clips as files."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from torchsbp.train.data.moving import MOTIONS, Moving

from ..runs import merged

SWIN = {"embed_dim": 8, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 2, 2], "window_size": [2, 4, 4]}
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3}
SIZES = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "patch_size": 8}
VIDEOMAE = {**SIZES, "intermediate_size": 48}
VIVIT = {name: size for name, size in VIDEOMAE.items() if name != "patch_size"} | {"tubelet_size": [2, 8, 8]}
PREDICTOR = {"pred_hidden_size": 24, "pred_num_attention_heads": 3, "pred_num_hidden_layers": 1}
VJEPA = {**SIZES, **PREDICTOR, "mlp_ratio": 2, "num_pooler_layers": 1}
TINY: dict[str, Any] = {
    "task": {
        "name": "video",
        "model": {"name": "swin3d_t", "options": SWIN, "drop_path": 0.1, "dropout": 0.2, "lr": 0.5},
        "data": {"source": "generated", "videos": [16, 8], "frames": 8, "stride": 2, "size": 32, "workers": 0},
        "augment": {"scale": [0.7, 1.0], "hflip": 0.0, "smoothing": 0.1},
    },
    "sbp": {"preset": "fast", "sampler": "frames"},
    "epochs": 2,
    "batch": 8,
    "micro_batch": 4,
    "optimizer": {"lr": 1e-3, "clip_norm": 5.0},
    "schedule": {"warmup_epochs": 0.5},
    "precision": "float32",
    "device": "cpu",
    "checkpoint": {"every_steps": 1},
    "log": {"every_steps": 2, "progress": False},
}


def recipe(folder: Path, **changes: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(merged({**TINY, "out": str(folder / "run")}, changes)))
    return str(path)


def listed(root: Path, count: int = 8, frames: int = 20) -> Path:
    """Generated clips as arrays in files, and lists of them."""
    root.mkdir(parents=True)
    (root / "classes.txt").write_text("\n".join(MOTIONS))
    for seed, part in enumerate(("train", "val")):
        clips, rows = Moving(count, frames, 40, seed), []
        for number in range(count):
            np.save(root / f"{part} {number}.npy", clips.open(number).read(range(frames)).numpy())
            rows.append(f"{part} {number}.npy {clips.labels[number][0]}")
        (root / f"{part}.txt").write_text("\n".join(rows))
    return root

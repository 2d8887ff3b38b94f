"""Digests of outputs, kept positions and gradients of patched models, to show that a refactoring changes no bit.

    python benchmarks/digest.py --out before.json      # at one commit
    python benchmarks/digest.py --compare before.json  # at another, on the same machine: exit status 1 if any differs

Covers tiny random models of every family, with every rule and option that their blocks have, in float64 and bfloat16
autocast, on CPU with one thread. Only the public API is used, so that the file runs at any commit.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn

import torchsbp

VIT = {"depth": 3, "embed_dim": 24, "num_heads": 3, "img_size": (64, 96), "num_classes": 5, "drop_path_rate": 0.3}
SMALL = VIT | {"img_size": (32, 48), "patch_size": 8}
CONVNEXT = {"depths": (1, 1, 3, 1), "dims": (8, 12, 16, 20), "num_classes": 5, "drop_path_rate": 0.3}
HYBRID = {"img_size": (64, 96), "depths": (1, 1, 3, 1), "embed_dim": (16, 16, 32, 32), "stem_width": 16}
HYBRID |= {"transformer_dim_head": 8, "num_classes": 5, "drop_path_rate": 0.3}
SWIN = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 3)}
SWIN |= {"num_classes": 5, "drop_path_rate": 0.3}
LAYER = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 64, "patch_size": 16}
LAYER |= {"num_labels": 5, "intermediate_size": 48}


def of_timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, **options)


def of_transformers(name: str, **options: Any) -> Callable[[], nn.Module]:
    kind = getattr(transformers, name)
    return lambda: kind._from_config(kind.config_class(**options))


def torchvision_convnext() -> nn.Module:
    config = torchvision.models.convnext.CNBlockConfig
    blocks = [config(8, 12, 1), config(12, 16, 1), config(16, 20, 3), config(20, None, 1)]
    return torchvision.models.ConvNeXt(blocks, num_classes=5, layer_scale=0.5, stochastic_depth_prob=0.3)


def torchvision_swin(window: tuple[int, ...]) -> Callable[[], nn.Module]:
    video = len(window) == 3
    kind = torchvision.models.video.swin_transformer.SwinTransformer3d if video else torchvision.models.SwinTransformer
    sizes = {"patch_size": [2] * len(window), "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 3]}
    return lambda: kind(**sizes, window_size=list(window), num_classes=5, stochastic_depth_prob=0.3)


LEAN, QUERY = ("query", "qkv", "head"), ("query",)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[str, ...]]] = {
    "vit": (of_timm("vit_tiny_patch16_224", **VIT), (3, 64, 96), LEAN),
    "vit layer scale, qk norm": (
        of_timm("vit_tiny_patch16_224", **VIT, init_values=0.5, qk_norm=True),
        (3, 64, 96),
        LEAN,
    ),
    "vit registers, rms norm": (
        of_timm("vit_tiny_patch16_224", **VIT, reg_tokens=2, norm_layer="rmsnorm", act_layer="quick_gelu"),
        (3, 64, 96),
        LEAN,
    ),
    "torchvision vit": (
        lambda: torchvision.models.VisionTransformer(64, 16, 3, 3, 24, 48, num_classes=5),
        (3, 64, 64),
        LEAN,
    ),
    "transformers vit": (of_transformers("ViTForImageClassification", **LAYER), (3, 64, 64), LEAN),
    "transformers dinov2": (
        of_transformers("Dinov2ForImageClassification", **LAYER, layerscale_value=0.5, drop_path_rate=0.3),
        (3, 64, 64),
        LEAN,
    ),
    "videomae": (
        of_transformers("VideoMAEForVideoClassification", **LAYER, num_frames=4, tubelet_size=2),
        (4, 3, 64, 64),
        LEAN,
    ),
    "convnext": (of_timm("convnext_tiny", **CONVNEXT, ls_init_value=0.5), (3, 64, 96), QUERY),
    "convnext 1×1": (of_timm("convnext_tiny", **CONVNEXT, conv_mlp=True), (3, 70, 130), QUERY),
    "torchvision convnext": (torchvision_convnext, (3, 64, 96), QUERY),
    "transformers convnext": (
        of_transformers("ConvNextForImageClassification", hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 3, 1]),
        (3, 64, 96),
        QUERY,
    ),
    "convnext v2": (of_timm("convnextv2_tiny", **CONVNEXT), (3, 64, 96), QUERY),
    "convnext rms": (of_timm("convnext_zepto_rms", **CONVNEXT, ls_init_value=0.5), (3, 64, 96), QUERY),
    "eva02": (of_timm("eva02_tiny_patch14_224", **SMALL), (3, 32, 48), QUERY),
    "dinov3": (of_timm("vit_small_patch16_dinov3", **SMALL, init_values=0.5), (3, 32, 48), QUERY),
    "beit": (of_timm("beitv2_base_patch16_224", **SMALL, init_values=0.5), (3, 32, 48), QUERY),
    "relative": (of_timm("vit_relpos_small_patch16_224", **SMALL), (3, 32, 48), QUERY),
    "mixer": (
        lambda: timm.models.mlp_mixer.MlpMixer(
            num_blocks=3, embed_dim=24, img_size=32, patch_size=8, num_classes=5, drop_path_rate=0.3
        ),
        (3, 32, 32),
        QUERY,
    ),
    "parallel": (
        of_timm("vit_tiny_patch16_224", **SMALL, block_fn=timm.models.vision_transformer.ParallelThingsBlock),
        (3, 32, 48),
        QUERY,
    ),
    "coatnet": (of_timm("coatnet_0_rw_224", **HYBRID), (3, 64, 96), QUERY),
    "maxvit": (of_timm("maxvit_tiny_rw_224", **HYBRID), (3, 64, 96), QUERY),
    "coatnext": (of_timm("coatnext_nano_rw_224", **HYBRID, conv_init_values=0.5), (3, 64, 96), QUERY),
    "swin": (of_timm("swin_tiny_patch4_window7_224", **SWIN), (3, 32, 32), QUERY),
    "swin v2": (of_timm("swinv2_tiny_window8_256", **SWIN), (3, 32, 32), QUERY),
    "swin v2 cr": (of_timm("swinv2_cr_tiny_ns_224", **SWIN), (3, 32, 32), QUERY),
    "torchvision swin": (torchvision_swin((5, 3)), (3, 36, 20), QUERY),
    "video swin": (torchvision_swin((4, 3, 5)), (3, 10, 36, 28), QUERY),
    "transformers swin": (
        of_transformers(
            "SwinForImageClassification",
            **{"image_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 12, "depths": [2, 2]},
            **{"num_heads": [2, 3], "num_labels": 5},
        ),
        (3, 32, 32),
        QUERY,
    ),
}
ERROR = "error"
OPTIONS: dict[str, dict[str, Any]] = {
    "r=1": {"keep_ratio": 1.0},
    "r=0.5": {"keep_ratio": 0.5},
    "r=0.25, saved, block": {"keep_ratio": 0.25, "recompute": False, "scope": "block"},
    "per sample, over depth": {"keep_ratio": (0.25, 0.75), "per_sample": True, "sampler": "random", "blocks": 1.0},
    "weight": {"keep_ratio": 0.5, "scale": "weight", "recompute": 0.5},
}


def cases() -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """Yield (model, rule, options, precision)."""
    for model, (_, _, rules) in MODELS.items():
        for rule in rules:
            for title, options in OPTIONS.items():
                if rule != "head" or title != "weight":
                    yield model, rule, {**options, "attention": rule}, "float64"
            yield model, rule, {"keep_ratio": 0.5, "attention": rule}, "bfloat16"


def digest(name: str, options: dict[str, Any], precision: str) -> str:
    """The digest of two training steps: outputs, kept positions, gradients."""
    build, shape, _ = MODELS[name]
    torch.manual_seed(0)
    model = build().double().train()
    with torch.no_grad():
        for p in model.parameters():  # initial values of zero would hide differences
            p.add_(torch.randn_like(p) * 0.1)
    x = torch.randn(2, *shape, dtype=torch.float64)
    if precision == "bfloat16":
        model, x = model.float(), x.float()
    torchsbp.apply(model, **options)
    found = hashlib.sha256()
    for seed in range(2):
        model.zero_grad()
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            y = model(x)
        y = y if isinstance(y, Tensor) else y.logits
        slope = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        (y * slope + y.square()).sum().backward()
        for site, positions in sorted(torchsbp.kept(model).items()):
            add(found, site, positions)
        add(found, "output", y.detach())
        for parameter, p in sorted(model.named_parameters()):
            if p.grad is not None:
                add(found, parameter, p.grad)
    return found.hexdigest()[:16]


def add(found: Any, name: str, value: Tensor) -> None:
    found.update(name.encode())
    found.update(value.flatten().clone().view(torch.uint8).numpy().tobytes())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the digests here")
    parser.add_argument("--compare", type=Path, help="digests of another commit")
    parser.add_argument("--only", default="", help="models whose name has this in it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for model, rule, options, precision in cases():
        if args.only in model:
            title = f"{model} | {rule} | {precision} | " + ", ".join(f"{k}={v}" for k, v in options.items())
            try:
                found[title] = digest(model, options, precision)
            except (RuntimeError, ValueError) as error:
                found[title] = f"{ERROR} {type(error).__name__}: {error}".splitlines()[0]
            print(found[title], title, flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    if not args.compare:
        return 0
    before = {title: its for title, its in json.loads(args.compare.read_text()).items() if args.only in title}
    failed = [title for title, its in before.items() if its.startswith(ERROR)]
    differing = [title for title in found | before if found.get(title) != before.get(title) and title not in failed]
    print(f"{len(found)} cases of {len(MODELS)} models, {len(differing)} differ", *differing, sep="\n  ")
    print(f"not compared, since they failed before: {len(failed)}", *failed, sep="\n  ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())

"""Tiny backbones as detection and segmentation wrap them, each with its input and what a detector freezes of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from typing import Any

import timm
import torch
import transformers
from torch import Tensor, nn
from torchvision.models import convnext, swin_transformer, vision_transformer
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.feature_extraction import create_feature_extractor
from transformers.models.maskformer.modeling_maskformer_swin import MaskFormerSwinBackbone

CONVNEXT = {"depths": (1, 1, 2, 1), "dims": (8, 12, 16, 20)}
SCALED = CONVNEXT | {"ls_init_value": 0.5, "drop_path_rate": 0.2}
SWIN = {"img_size": (64, 96), "window_size": 4, "embed_dim": 12, "depths": (2, 1), "num_heads": (2, 3)}
SWIN |= {"out_indices": (0, 1)}
ANY_SIZE = {"window_size": 5, "strict_img_size": False, "always_partition": True}
HYBRID = {"img_size": (64, 96), "depths": (1, 1, 1, 1), "embed_dim": (16, 16, 16, 16), "stem_width": 16}
HYBRID |= {"transformer_dim_head": 8}
VIT = {"img_size": (64, 96), "depth": 2, "embed_dim": 24, "num_heads": 3, "out_indices": (0, 1)}

EDGENEXT = {"depths": (1, 2, 2, 2), "dims": (8, 16, 32, 64), "heads": (2, 2, 2, 2)}
PIT = {"img_size": (64, 96), "base_dims": (8, 8, 8), "depth": (1, 2, 1), "heads": (1, 2, 4)}
UNITS = {"img_size": (64, 96), "embed_dim": 8, "num_heads": 1, "stages": (2, 2, 1, 1), "out_indices": (0, 1)}
HIERA = {"embed_dim": 8, "num_heads": 1, "stages": (2, 1, 2, 1), "global_att_blocks": (4,)}

HF_VIT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 64, "patch_size": 16}
HF_VIT |= {"out_features": ["stage1", "stage2"]}
HF_CONVNEXT = {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 2, 1], "drop_path_rate": 0.2}
HF_CONVNEXT |= {"out_features": ["stem", "stage1", "stage2", "stage3", "stage4"]}
HF_SWIN = {"image_size": 64, "window_size": 4, "embed_dim": 12, "depths": [2, 1], "num_heads": [2, 3]}
HF_SWIN |= {"out_features": ["stage1", "stage2"]}


def maps_of(y: Any) -> list[Tensor]:
    """The feature maps in what a backbone returns: a tensor, a list, a dictionary, or an output of transformers."""
    y = getattr(y, "feature_maps", y)
    if isinstance(y, Tensor):
        return [y]
    return list(y.values() if isinstance(y, Mapping) else y)


class Maps(nn.Module):
    """All feature maps of a backbone as one tensor, a row for each image."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([y.flatten(1) for y in maps_of(self.body(x))], 1)


@dataclass(frozen=True)
class Wrapper:
    """How to build a backbone, the size of its images, and patterns for what a detector freezes of it: its stem and
    first stage, or its embedding and first block."""

    build: Callable[[], nn.Module]
    frozen: tuple[str, ...]
    size: tuple[int, int] = (64, 96)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = Maps(self.build()).double().train()
        with torch.no_grad():
            for p in model.parameters():  # nothing at its initial zero or 1e-6, where errors would hide
                p.add_(torch.randn_like(p) * 0.1)
        return model

    def images(self, batch: int = 2) -> Tensor:
        return torch.randn(batch, 3, *self.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def freeze(self, model: nn.Module) -> None:
        """In eval mode and without gradients."""
        left = set(self.frozen)
        for name, part in (*model.named_modules(), *model.named_parameters()):
            matched = {pattern for pattern in self.frozen if fnmatch(name, f"body.{pattern}")}
            left -= matched
            if matched:
                part.requires_grad_(False)
                if isinstance(part, nn.Module):
                    part.eval()
        assert not left, f"nothing to freeze for {left}"


def features(name: str, **options: Any) -> Callable[[], nn.Module]:
    """timm's, with features only."""
    return partial(timm.create_model, name, features_only=True, **options)


def torchvision_convnext() -> nn.Module:
    config = convnext.CNBlockConfig
    blocks = [config(8, 12, 1), config(12, 16, 1), config(16, 20, 2), config(20, None, 1)]
    return convnext.ConvNeXt(blocks, num_classes=5, layer_scale=0.5, stochastic_depth_prob=0.2)


def torchvision_swin(**options: Any) -> nn.Module:
    return swin_transformer.SwinTransformer([4, 4], 12, [2, 1], [2, 3], [4, 4], num_classes=5, **options)


torchvision_swin_v2 = partial(
    torchvision_swin, block=swin_transformer.SwinTransformerBlockV2, downsample_layer=swin_transformer.PatchMergingV2
)


def torchvision_vit() -> nn.Module:
    return vision_transformer.VisionTransformer(64, 16, 2, 3, 24, 48, num_classes=5)


CONVNEXT_LAYERS, SWIN_LAYERS = ("1", "3", "5", "7"), ("1", "3")


def layers(build: Callable[[], nn.Module], names: tuple[str, ...]) -> Callable[[], nn.Module]:
    """torchvision's IntermediateLayerGetter for these layers of ``model.features``."""
    return lambda: IntermediateLayerGetter(build().features, {name: name for name in names})


def pyramid() -> nn.Module:
    """What torchvision's detectors are given."""
    return BackboneWithFPN(torchvision_convnext().features, {"1": "0", "3": "1", "5": "2"}, [8, 12, 16], 8)


def traced(build: Callable[[], nn.Module], nodes: tuple[str, ...], *leaves: type) -> Callable[[], nn.Module]:
    """torchvision's create_feature_extractor, with modules of these classes called instead of traced through."""
    options = {"tracer_kwargs": {"leaf_modules": list(leaves)}} if leaves else {}
    return lambda: create_feature_extractor(build(), list(nodes), **options)


CONVNEXT_NODES = tuple(f"features.{name}" for name in CONVNEXT_LAYERS)
SWIN_NODES = tuple(f"features.{name}" for name in SWIN_LAYERS)
VIT_NODES = ("encoder.layers.encoder_layer_1", "encoder.ln")


def backbone(cls: str | type, **options: Any) -> Callable[[], nn.Module]:
    """transformers', by its class or that class's name."""

    def build() -> nn.Module:
        kind = getattr(transformers, cls) if isinstance(cls, str) else cls
        return kind._from_config(kind.config_class(**options))

    return build


def timm_backbone(name: str, out_indices: tuple[int, ...], **options: Any) -> Callable[[], nn.Module]:
    """transformers' wrapper of timm's models."""
    config = transformers.TimmBackboneConfig(backbone=name, out_indices=out_indices)
    return lambda: transformers.TimmBackbone(config, **options)


STEM, PATCHES = ("stem*", "stages_0*"), ("patch_embed*", "layers_0*")
INNER_STEM = ("model.stem*", "model.stages.0*")
INNER_PATCHES = ("model.patch_embed*", "model.layers.0*")
INNER_VIT = ("model.patch_embed*", "model.[!b]*_*", "model.blocks.0*")
FEATURES = ("features.0*", "features.1*")
ENCODER = ("embeddings*", "encoder.layer.0*")

TIMM = {
    "convnext": Wrapper(features("convnext_tiny", **SCALED), STEM),
    "convnext dict": Wrapper(features("convnext_tiny", feature_cls="dict", **SCALED), STEM),
    "convnext hook": Wrapper(features("convnext_tiny", feature_cls="hook", **SCALED), STEM),
    "convnext getter": Wrapper(features("convnext_tiny", feature_cls="getter", **SCALED), INNER_STEM),
    "convnext first stages": Wrapper(features("convnext_tiny", out_indices=(0, 1), **SCALED), STEM),
    "convnext getter, first stages": Wrapper(
        features("convnext_tiny", feature_cls="getter", out_indices=(0, 1), **SCALED), INNER_STEM
    ),
    "convnext 1×1 conv, overlapping stem": Wrapper(features("convnext_atto_ols", **CONVNEXT), STEM),
    "convnext v2": Wrapper(features("convnextv2_tiny", **CONVNEXT), STEM),
    "convnext v2 getter": Wrapper(features("convnextv2_tiny", feature_cls="getter", **CONVNEXT), INNER_STEM),
    "convnext stride 16": Wrapper(features("convnext_tiny", output_stride=16, **SCALED), STEM),
    "convnext stride 8": Wrapper(features("convnext_tiny", output_stride=8, **SCALED), STEM),
    "convnext stride 16 getter": Wrapper(
        features("convnext_tiny", output_stride=16, feature_cls="getter", **SCALED), INNER_STEM
    ),
    "convnext stride 16, plain": Wrapper(
        partial(timm.create_model, "convnext_tiny", output_stride=16, num_classes=5, **SCALED), ("stem*", "stages.0*")
    ),
    "swin": Wrapper(features("swin_tiny_patch4_window7_224", **SWIN), PATCHES),
    "swin padded": Wrapper(features("swin_tiny_patch4_window7_224", **SWIN | ANY_SIZE), PATCHES, (36, 52)),
    "swin hook": Wrapper(features("swin_tiny_patch4_window7_224", feature_cls="hook", **SWIN), PATCHES),
    "swin getter": Wrapper(features("swin_tiny_patch4_window7_224", feature_cls="getter", **SWIN), INNER_PATCHES),
    "swin v2": Wrapper(features("swinv2_tiny_window8_256", **SWIN), PATCHES),
    "swin v2 getter": Wrapper(features("swinv2_tiny_window8_256", feature_cls="getter", **SWIN), INNER_PATCHES),
    "swin cr": Wrapper(features("swinv2_cr_tiny_224", **SWIN), ("patch_embed*", "stages_0*")),
    "swin cr getter": Wrapper(
        features("swinv2_cr_tiny_224", feature_cls="getter", **SWIN), ("model.patch_embed*", "model.stages.0*")
    ),
    "coatnet": Wrapper(features("coatnet_0_rw_224", **HYBRID), STEM),
    "coatnet getter": Wrapper(features("coatnet_0_rw_224", feature_cls="getter", **HYBRID), INNER_STEM),
    "maxvit": Wrapper(features("maxvit_tiny_rw_224", **HYBRID), STEM),
    "maxvit hook": Wrapper(features("maxvit_tiny_rw_224", feature_cls="hook", **HYBRID), STEM),
    "maxvit getter": Wrapper(features("maxvit_tiny_rw_224", feature_cls="getter", **HYBRID), INNER_STEM),
    "vit": Wrapper(features("vit_tiny_patch16_224", **VIT), INNER_VIT),
    "vit hook": Wrapper(
        features("vit_tiny_patch16_224", feature_cls="hook", **VIT),
        ("body.patch_embed*", "body.[!b]*_*", "body.blocks.0*"),
    ),
    "eva": Wrapper(features("eva02_tiny_patch14_224", patch_size=16, **VIT), INNER_VIT),
    "dinov3": Wrapper(features("vit_small_patch16_dinov3", **VIT), INNER_VIT),
    "beit": Wrapper(features("beit_base_patch16_224", **VIT), INNER_VIT),
    "mambaout": Wrapper(features("mambaout_femto", **CONVNEXT), STEM),
    "edgenext dict": Wrapper(features("edgenext_small", feature_cls="dict", **EDGENEXT), STEM),
    "pit": Wrapper(features("pit_ti_224", **PIT), ("body.patch_embed*", "body.*_*", "body.transformers.0*")),
    "hiera, first stages": Wrapper(features("hiera_tiny_224", **UNITS), ("model.patch_embed*", "model.pos_embed*")),
    "hieradet": Wrapper(features("hieradet_small", **HIERA), ("model.patch_embed*", "model.pos_embed*")),
}
TORCHVISION = {
    "convnext layers": Wrapper(layers(torchvision_convnext, CONVNEXT_LAYERS), ("0*", "1*")),
    "convnext first layers": Wrapper(layers(torchvision_convnext, ("1", "3")), ("0*", "1*")),
    "convnext in one layer": Wrapper(
        lambda: IntermediateLayerGetter(torchvision_convnext(), {"features": "0"}), FEATURES
    ),
    "convnext features": Wrapper(lambda: torchvision_convnext().features, ("0*", "1*")),
    "convnext pyramid": Wrapper(pyramid, ("body.0*", "body.1*")),
    "convnext traced": Wrapper(traced(torchvision_convnext, CONVNEXT_NODES, convnext.CNBlock), FEATURES),
    "swin layers": Wrapper(layers(torchvision_swin, SWIN_LAYERS), ("0*", "1*")),
    "swin features, padded": Wrapper(lambda: torchvision_swin().features, ("0*", "1*"), (36, 52)),
    "swin traced": Wrapper(
        traced(torchvision_swin, SWIN_NODES, swin_transformer.SwinTransformerBlock, swin_transformer.PatchMerging),
        FEATURES,
    ),
    "swin traced, blocks alone": Wrapper(
        traced(torchvision_swin, SWIN_NODES, swin_transformer.SwinTransformerBlock), FEATURES
    ),
    "swin v2 layers": Wrapper(layers(torchvision_swin_v2, SWIN_LAYERS), ("0*", "1*")),
    "swin v2 traced": Wrapper(
        traced(torchvision_swin_v2, SWIN_NODES, swin_transformer.SwinTransformerBlockV2), FEATURES
    ),
    "vit traced": Wrapper(
        traced(torchvision_vit, VIT_NODES, vision_transformer.EncoderBlock),
        ("conv_proj*", "class_token", "encoder.pos_embedding", "encoder.layers.encoder_layer_0*"),
        (64, 64),
    ),
}
TRANSFORMERS = {
    "convnext": Wrapper(backbone("ConvNextBackbone", **HF_CONVNEXT), ("embeddings*", "encoder.stages.0*")),
    "convnext v2": Wrapper(backbone("ConvNextV2Backbone", **HF_CONVNEXT), ("embeddings*", "encoder.stages.0*")),
    "dinov3 convnext": Wrapper(backbone("DINOv3ConvNextBackbone", **HF_CONVNEXT), ("model.stages.0*",)),
    "swin": Wrapper(backbone("SwinBackbone", **HF_SWIN), ("swin.embeddings*", "swin.encoder.layers.0*")),
    "swin v2": Wrapper(backbone("Swinv2Backbone", **HF_SWIN), ("embeddings*", "encoder.layers.0*")),
    "maskformer swin": Wrapper(
        backbone(MaskFormerSwinBackbone, **HF_SWIN), ("model.embeddings*", "model.encoder.layers.0*")
    ),
    "dinov2": Wrapper(backbone("Dinov2Backbone", **HF_VIT), ENCODER, (64, 64)),
    "dinov2 with registers": Wrapper(backbone("Dinov2WithRegistersBackbone", **HF_VIT), ENCODER, (64, 64)),
    "dinov3": Wrapper(backbone("DINOv3ViTBackbone", **HF_VIT), ("embeddings*", "model.layer.0*"), (64, 64)),
    "vitpose": Wrapper(
        backbone("VitPoseBackbone", **HF_VIT | {"image_size": [64, 96], "patch_size": [16, 16]}), ENCODER
    ),
    "beit": Wrapper(
        backbone("BeitBackbone", use_relative_position_bias=True, **HF_VIT),
        ("beit.embeddings*", "beit.layers.0*"),
        (64, 64),
    ),
    "convnext v2 model": Wrapper(backbone("ConvNextV2Model", **HF_CONVNEXT), ("embeddings*", "encoder.stages.0*")),
    "dinov3 convnext model": Wrapper(backbone("DINOv3ConvNextModel", **HF_CONVNEXT), ("model.stages.0*",)),
    "beit model": Wrapper(
        backbone("BeitModel", use_shared_relative_position_bias=True, **HF_VIT),
        ("embeddings*", "layers.0*"),
        (64, 64),
    ),
    "timm convnext": Wrapper(
        timm_backbone("convnext_tiny", (0, 1, 2, 3), **SCALED), ("_backbone.stem*", "_backbone.stages_0*")
    ),
    "timm swin": Wrapper(
        timm_backbone("swin_tiny_patch4_window7_224", (0, 1), **{k: v for k, v in SWIN.items() if k != "out_indices"}),
        ("_backbone.patch_embed*", "_backbone.layers_0*"),
    ),
    "timm vit": Wrapper(
        timm_backbone("vit_tiny_patch16_224", (0, 1), **{k: v for k, v in VIT.items() if k != "out_indices"}),
        ("_backbone.model.[!b]*_*", "_backbone.model.blocks.0*"),
    ),
}
LIBRARIES = {"timm": TIMM, "torchvision": TORCHVISION, "transformers": TRANSFORMERS}
WRAPPERS = {f"{library} {name}": w for library, table in LIBRARIES.items() for name, w in table.items()}


class Pieces(nn.Module):
    """Somebody's own wrapper: parts of a timm ConvNeXt under names of their own."""

    def __init__(self) -> None:
        super().__init__()
        model = timm.create_model("convnext_tiny", **SCALED)
        self.bottom, self.levels = model.stem, model.stages

    def forward(self, x: Tensor) -> list[Tensor]:
        x, maps = self.bottom(x), []
        for level in self.levels:
            x = level(x)
            maps.append(x)
        return maps


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "own wrapper": (Pieces, "torchsbp.register"),
    "torchvision convnext traced through": (traced(torchvision_convnext, CONVNEXT_NODES), "leaf_modules"),
    "torchvision swin traced through": (traced(torchvision_swin, SWIN_NODES), "leaf_modules"),
    "torchvision vit traced through": (traced(torchvision_vit, VIT_NODES), "leaf_modules"),
    "timm convnext fx": (features("convnext_tiny", feature_cls="fx", **CONVNEXT), 'feature_cls="getter"'),
    "timm vit fx": (features("vit_tiny_patch16_224", feature_cls="fx", **VIT), 'feature_cls="getter"'),
}
"""Backbones that are not taken, and the way out that the error names."""


class Two(nn.Module):
    """Two backbones, each for an image of its own."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return torch.cat([self.first(x), self.second(other)], 1)


class Siamese(nn.Module):
    """One backbone for two images."""

    def __init__(self, twin: nn.Module) -> None:
        super().__init__()
        self.twin = twin

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return torch.cat([self.twin(x), self.twin(other)], 1)

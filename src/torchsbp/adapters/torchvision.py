"""torchvision: ViT and ConvNeXt."""

from torch import nn

from .base import Adapter, Stage, early_stages
from .parts import ConvBlock, Downsample, TransformerBlock

VIT = Adapter(
    name="torchvision ViT",
    model="torchvision.models.vision_transformer.VisionTransformer",
    entry="conv_proj",
    stages="encoder.layers",
    prefix=1,
    blocks={
        "torchvision.models.vision_transformer.EncoderBlock": TransformerBlock(
            idle=(
                *("dropout", "mlp.2", "mlp.4", "self_attention.dropout"),
                *("self_attention.bias_k", "self_attention.bias_v", "self_attention.add_zero_attn"),
            ),
            classes={
                "self_attention": ("torch.nn.modules.activation.MultiheadAttention",),
                "mlp": ("torchvision.models.vision_transformer.MLPBlock",),
            },
            norm1="ln_1",
            heads="self_attention.num_heads",
            softmax_scale="",
            fused="",
            qkv="self_attention.in_proj_weight",
            q_norm="",
            k_norm="",
            proj="self_attention.out_proj",
            scale1="",
            drop1="",
            norm2="ln_2",
            fc1="mlp.0",
            act="mlp.1",
            fc2="mlp.3",
            scale2="",
            drop2="",
        )
    },
)


def convnext_stages(model: nn.Module) -> list[Stage]:
    """``features`` alternates: stem, stage, down-sampling layer, stage, …"""
    features = list(model.features)  # type: ignore[arg-type]
    return [
        Stage(tuple(f"features.{i}.{j}" for j in range(len(features[i]))), f"features.{i - 1}" if i > 1 else "")
        for i in range(1, len(features), 2)
    ]


CONVNEXT = Adapter(
    name="torchvision ConvNeXt",
    model="torchvision.models.convnext.ConvNeXt",
    entry="features.0",
    stages=convnext_stages,
    blocks={
        "torchvision.models.convnext.CNBlock": ConvBlock(
            conv="block.0",
            norm="block.2",
            fc1="block.3",
            act="block.4",
            fc2="block.5",
            scale="layer_scale",
            drop="stochastic_depth",
        )
    },
    recipe=early_stages,
    downsample=Downsample(),
)

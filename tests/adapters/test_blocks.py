"""blocks_of: one list of blocks for SBP, memory, sharding and checkpointing."""

import pytest
import timm
import torch
import torch.distributed as dist
import torchvision
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchsbp
from torchsbp.adapters import find_backbones
from torchsbp.adapters.blocks import block_classes, blocks_of
from torchsbp.adapters.names import inside
from torchsbp.memory.estimate import checkpoint_blocks

from ..models import MODELS, TRANSFORMERS, tiny_vit
from ..steps import assert_gradients, sampled_in, step


def maxxvit(stages: tuple[int, ...]) -> list[str]:
    parts = ("conv", "attn_block", "attn_grid")
    return [f"stages.{s}.blocks.{i}.{part}" for s, depth in enumerate(stages) for i in range(depth) for part in parts]


@pytest.mark.parametrize(
    "name, first, count",
    [
        ("resnet18", "layer1.0", 8),
        ("swin_tiny_patch4_window7_224", "layers.0.blocks.0", 12),
        ("convnext_atto", "stages.0.blocks.0", 12),
        ("vit_tiny_patch16_224", "blocks.0", 12),
        ("efficientnet_b0", "blocks.0.0", 16),
        ("coatnet_0_224", "stages.0.blocks.0", 12),
    ],
)
def test_models_of_timm(name, first, count):
    with torch.device("meta"):
        found = blocks_of(timm.create_model(name))
    assert (found[0], len(found)) == (first, count)


def test_other_models():
    with torch.device("meta"):
        models = {
            "torchvision vit": (torchvision.models.vit_b_32(), "encoder.layers.encoder_layer_0", 12),
            "torchvision efficientnet": (torchvision.models.efficientnet_b0(), "features.1.0", 16),
            "one layer": (nn.Linear(2, 2), None, 0),
        }
    for model, first, count in models.values():
        found = blocks_of(model)
        assert (next(iter(found), None), len(found)) == (first, count)


def test_units_of_maxxvit_are_not_nested():
    """A MaxxViT block is three units, of which each is a block: sharding takes these, as sampling does."""
    model = MODELS["maxxvit relative mlp"].model()
    assert blocks_of(model) == maxxvit((1, 1, 3, 1))
    assert len(block_classes(model)) == 2


@pytest.mark.parametrize("name", MODELS)
def test_no_block_is_inside_of_another_and_patching_changes_nothing(name):
    model = MODELS[name].model()
    blocks = blocks_of(model)
    assert blocks == list(dict.fromkeys(blocks))
    assert not any(inside(one, other) for one in blocks for other in blocks if one != other)
    classes = block_classes(model)
    torchsbp.apply(model, blocks=1.0)
    assert blocks_of(model) == blocks
    assert block_classes(model) == classes


@pytest.mark.parametrize("name", MODELS)
def test_sampling_takes_these_blocks_and_layers_between_stages(name):
    model = torchsbp.apply(MODELS[name].model(), blocks=1.0)
    ((prefix, backbone, adapter, layout),) = find_backbones(model)
    layers = {stage.downsample for stage in layout.stages_of(backbone)}
    start = f"{prefix}." if prefix else ""
    blocks = [block.removeprefix(start) for block in blocks_of(model)]
    sampled = [site for site in sampled_in(model) if site not in layers]
    assert sampled == [block for block in blocks if adapter.sampled(backbone.get_submodule(block))]


def test_sharding_takes_these_blocks(tmp_path):
    tiny = MODELS["maxxvit relative mlp"]
    model, expected = (torchsbp.apply(tiny.model(depths=(1, 1, 1, 1)), keep_ratio=0.5) for _ in range(2))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for name in blocks_of(model):
            fully_shard(model.get_submodule(name), mesh=init_device_mesh("cpu", (1,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        _, found = step(model, tiny.images())
        found = {name: g.full_tensor() for name, g in found.items()}
    finally:
        dist.destroy_process_group()
    assert_gradients(found, step(expected, tiny.images())[1])


def test_a_backbone_in_a_model_beside_blocks_of_another_make():
    model = nn.ModuleDict({"eye": tiny_vit(depth=2), "rest": timm.create_model("resnet18")})
    assert blocks_of(model)[:3] == ["eye.blocks.0", "eye.blocks.1", "rest.layer1.0"]


def test_memory_speaks_of_these_blocks():
    build = TRANSFORMERS["transformers vit"].model
    found = torchsbp.estimate(build, (2, 3, 64, 64), "full", "float32", device="cpu")
    assert list(found.saved) == blocks_of(build())


def test_checkpointing_takes_these_blocks():
    model = checkpoint_blocks(timm.create_model("maxxvit_rmlp_nano_rw_256", img_size=64, depths=(1, 1, 1, 1)))
    changed = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert changed == blocks_of(model)


def test_the_classes_of_blocks_are_the_libraries_own():
    config = transformers.ViTConfig(num_hidden_layers=2, hidden_size=12, num_attention_heads=2, intermediate_size=12)
    model = torchsbp.apply(transformers.ViTModel(config))
    assert block_classes(model) == ["transformers.models.vit.modeling_vit.ViTLayer"]

"""Fails loudly: what is refused, in which words, and that the model is left as it was."""

import copy
import gc
import pickle
import weakref

import pytest
import timm
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

import torchsbp
from torchsbp import SBPConfig, schedules
from torchsbp.errors import UsageError
from torchsbp.patching.site import Site

from ..models import LEAN, TOKENS, images, tiny_convnext, tiny_vit
from ..steps import entry_of, step


class NoBlock:
    """A filter that selects nothing, with a name that is the same in every process."""

    def __call__(self, name, block):
        return False

    def __repr__(self):
        return "no_block"


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("ratio", [0, -1, 1.5, float("nan"), float("inf"), [0.5, 0.0], []])
def test_bad_ratio(ratio):
    refuse({"keep_ratio": ratio}, ValueError, r"in \(0, 1\]")


@pytest.mark.parametrize("ratio", [True, None, {}])
def test_ratio_of_a_wrong_type(ratio):
    if ratio is None:
        with pytest.raises(TypeError, match=r"number in \(0, 1\]"):
            SBPConfig(keep_ratio=None)
    else:
        refuse({"keep_ratio": ratio}, TypeError, r"number in \(0, 1\].*found")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sampler": "gird"}, r"unknown sampler 'gird'.*'grid', 'random', 'stratified', 'frames', .*, 'norm'\]"),
        ({"attention": "kv"}, r"attention='kv' is not allowed; allowed: 'query', 'qkv', 'head', 'exact'"),
        ({"scope": "layer"}, r"scope='layer' is not allowed; allowed: 'branch', 'block'"),
        ({"scale": "both"}, r"scale='both' is not allowed; allowed: 'auto', 'none', 'weight', 'rows'"),
        ({"recompute": "yes"}, r"recompute='yes' is not allowed; allowed: True, False, a number in \[0, 1\]"),
        ({"scale": "weight", "attention": "head"}, r"scale=\"weight\" is defined for .* or scale=\"none\""),
        ({"scale": "rows", "attention": "head"}, r"scale=\"rows\" is defined for sampled rows"),
        ({"scale": "rows", "scope": "block"}, r"scope=\"block\" gates; use scope=\"branch\", or scale=\"none\""),
        ({"per_sample": "all"}, r"per_sample='all' is not allowed; allowed: 'auto', False, True, 'balanced'"),
        (
            {"per_sample": "balanced", "sampler": "frames_jitter"},
            r"does not allow; use per_sample=True, or one of the samplers \['grid', .*'frames', 'checkerboard'\]",
        ),
        (
            {"sampler": "norm", "attention": "qkv"},
            r"attention='qkv' does not go with that. Use attention='query' or 'exact'",
        ),
        ({"sampler": "norm", "per_sample": False}, r"per_sample=False does not go with that. Use per_sample=True"),
        ({"sampler": "norm", "per_sample": "balanced"}, r"which sampler='norm' does not allow; use per_sample=True"),
        (
            {"sampler": "norm", "per_block": False},
            r"per_block=False does not go with that. Use per_block=True, or another",
        ),
        ({"sampler": "norm", "exact_downsampling": False}, r"exact_downsampling=False does not go with that"),
        ({"sampler": "norm", "scale": "none"}, r"scale='none' does not go with that. Use scale='rows'"),
        ({"sampler": "norm", "scope": "block"}, r"scope='block' does not go with that. Use scope='branch'"),
        ({"per_block": True, "scope": "block"}, r"that every block keeps; use scope=\"branch\", or per_block=False"),
        ({"exact_downsampling": 2}, r"exact_downsampling=2 is not allowed; allowed: True, False"),
        ({"blocks": 1.5}, r"blocks=1.5 is not allowed; use None .* a fraction in \(0, 1\]"),
        ({"blocks": [7]}, r"blocks: 7 matches none of the 3 blocks, blocks.0 … blocks.2"),
        ({"blocks": ["layer.1"]}, r"blocks: 'layer.1' matches none of the 3 blocks"),
        ({"blocks": NoBlock()}, r"selects none of the 3 blocks"),
        ({"keep_ratio": [0.5, 0.5, 0.5]}, r"lists 3 ratios for 2 SBP blocks; give 2 of them"),
    ],
    ids=str,
)
def test_bad_options(options, message):
    refuse(options, ValueError, message)


@pytest.mark.parametrize(
    "options, found", [({"scale": "rows"}, 'scale="rows"'), ({"per_block": True}, "per_block=True")]
)
def test_sampled_downsampling_layers_that_would_gate_twice(options, found):
    model = tiny_convnext()
    with pytest.raises(ValueError, match=rf"downsample: {found} can't be combined with .* use exact_downsampling=True"):
        torchsbp.apply(model, exact_downsampling=False, **options)
    torchsbp.apply(model, exact_downsampling=True, **options)


def test_unknown_option():
    refuse({"ratio": 0.5}, TypeError, r"unknown option ratio; allowed: keep_ratio, sampler, attention")


def test_unknown_preset():
    with pytest.raises(
        ValueError, match=r"preset='papers' is not allowed; allowed: 'exact', 'default', 'fast', 'paper'"
    ):
        SBPConfig.preset("papers")


def refuse(options, error, message) -> None:
    """The error, and the model as it was."""
    model = LEAN["vit"].model()
    classes, attributes = [type(m) for m in model.modules()], [set(m.__dict__) for m in model.modules()]
    with pytest.raises(error, match=message):
        torchsbp.apply(model, **options)
    assert [type(m) for m in model.modules()] == classes
    assert [set(m.__dict__) for m in model.modules()] == attributes


def test_second_apply_and_needless_remove():
    model = torchsbp.apply(LEAN["vit"].model())
    with pytest.raises(ValueError, match=r"already patched .*call torchsbp.remove\(model\) first"):
        torchsbp.apply(model)
    torchsbp.remove(model)
    for call in (torchsbp.remove, torchsbp.kept, lambda m: torchsbp.set_step(m, 0)):
        with pytest.raises(ValueError, match="the model is not patched"):
            call(model)


def test_kept_before_training():
    with pytest.raises(RuntimeError, match="no forward has run in training mode"):
        torchsbp.kept(torchsbp.apply(LEAN["vit"].model()))


def test_nothing_to_patch_names_what_was_found():
    model = timm.create_model("resnet18")
    message = r"nothing to patch in timm.models.resnet.ResNet: .*timm.models.resnet.BasicBlock.*Supported.*: timm ViT"
    with pytest.raises(ValueError, match=message):
        torchsbp.apply(model)


class ForeignBlock(timm.models.vision_transformer.Block):
    """A subclass may compute anything."""


class BatchNormed(timm.layers.Mlp):
    def __init__(self, in_features, **options):
        super().__init__(in_features, **options)
        self.norm = nn.BatchNorm1d(4)


class Attending(timm.layers.Mlp):
    def __init__(self, in_features, **options):
        super().__init__(in_features, **options)
        self.inner = nn.MultiheadAttention(in_features, 1)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"attn_drop_rate": 0.1}, r"blocks.0: attn.attn_drop is Dropout\(p=0.1.*not supported"),
        ({"proj_drop_rate": 0.1}, r"attn.proj_drop is Dropout\(p=0.1(.|\n)*mlp.drop1 is Dropout\(p=0.1"),
        (
            {"block_fn": ForeignBlock},
            r"blocks.0 is .*ForeignBlock; supported: timm.models.vision_transformer.Block, .*",
        ),
        (
            {"mlp_layer": BatchNormed},
            r"blocks.0: mlp.norm is BatchNorm1d, whose statistics would be those of kept rows",
        ),
        (
            {"mlp_layer": Attending},
            r"mlp.inner is MultiheadAttention, which is not among the described mixers \(attn\)",
        ),
    ],
    ids=str,
)
def test_unsupported_parts_are_refused_by_name(options, message):
    model = tiny_vit(**options)
    with pytest.raises(ValueError, match=message):
        torchsbp.apply(model)
    assert not any(isinstance(m, Site) for m in model.modules())


def test_hooks_that_would_not_run_are_refused_by_name():
    model = tiny_vit()
    model.blocks[1].register_forward_hook(lambda *args: None)  # on a block: it runs
    handle = model.blocks[1].attn.register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match=r"blocks.1: attn has hooks, which would run twice in training"):
        torchsbp.apply(model)
    handle.remove()
    torchsbp.apply(model)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_parametrization_that_would_change_its_state_twice_is_refused_by_name(device):
    model = tiny_vit().to(device)
    parametrizations.spectral_norm(model.blocks[1].mlp.fc2)
    u = model.blocks[1].mlp.fc2.parametrizations.weight[0]._u
    before = u.clone()
    message = r"blocks.1: mlp.fc2.parametrizations.weight is _SpectralNorm, whose state changes in every forward; .*"
    with pytest.raises(UsageError, match=message + r"remove it \(torch.nn.utils.parametrize.remove_parametrizations\)"):
        torchsbp.apply(model)
    assert not any(isinstance(m, Site) for m in model.modules())
    assert device == "meta" or torch.equal(u, before)


@pytest.mark.parametrize("by", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_a_parametrization_without_a_changing_state_is_trained(by):
    model = tiny_vit()
    by(model.blocks[1].mlp.fc2)
    assert torchsbp.check(torchsbp.apply(model, 0.5, blocks=1.0), torch.randn(2, 3, 64, 96)).passed


def test_changes_inside_a_block_are_refused_when_training_begins():
    model = torchsbp.apply(tiny_vit())
    model.blocks[0].attn.proj_drop.p = 0.5
    model.eval()
    with pytest.raises(ValueError, match=r"SBPBlock was changed after torchsbp.apply: attn.proj_drop is Dropout"):
        model.train()
    torchsbp.remove(model)
    model.train()


@pytest.mark.parametrize("name", ["attn", "drop_path1"])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda part: torchsbp.remove(copy.deepcopy(part))])
def test_a_part_that_was_replaced_is_refused_when_training_begins(name, how):
    """In the run on kept rows attention would be among these alone, and stochastic depth would be drawn anew."""
    model = torchsbp.apply(TOKENS["differential attention"].model(drop_path=0.5), 0.5)
    setattr(model.blocks[1], name, how(getattr(model.blocks[1], name)))
    with pytest.raises(ValueError, match=rf"changed after torchsbp.apply: {name} is a \w+ that was not patched with"):
        model.train()
    assert torchsbp.check(torchsbp.apply(torchsbp.remove(model), 0.5), torch.randn(2, 3, 32, 48)).passed


@pytest.mark.parametrize("how", [copy.deepcopy, lambda block: torchsbp.remove(copy.deepcopy(block))])
@pytest.mark.parametrize("backbone", [lambda model: model, copy.deepcopy, lambda model: nn.Sequential(model)[0]])
def test_a_block_that_was_replaced_is_refused_when_training_begins_and_by_what_would_list_it(backbone, how):
    model = backbone(torchsbp.apply(tiny_vit().double()))
    step(model, images())
    model.blocks[1] = how(model.blocks[1])
    message = (
        r"VisionTransformer was changed after torchsbp.apply: blocks.1 is a Block that was not patched. Call torchsbp"
    )
    for noticing in (model.train, lambda: torchsbp.kept(model), lambda: torchsbp.check(model, images())):
        with pytest.raises(ValueError, match=message):
            noticing()
    assert torchsbp.check(torchsbp.apply(torchsbp.remove(model)).train(), images()).passed


@pytest.mark.parametrize("backbone", [lambda model: model, copy.deepcopy, pickled])
def test_blocks_that_were_replaced_with_their_list_are_refused(backbone):
    model = backbone(torchsbp.apply(tiny_vit().double()))
    step(model, images())
    model.blocks = nn.Sequential(*tiny_vit().double().blocks)
    message = r"VisionTransformer was changed after torchsbp.apply: blocks.1 is a Block that was not patched."
    for noticing in (model.train, lambda: torchsbp.kept(model), lambda: torchsbp.check(model, images())):
        with pytest.raises(ValueError, match=message):
            noticing()
    model.blocks = nn.Sequential(*torchsbp.apply(tiny_vit()).blocks)  # of another model: its masks are not drawn here
    with pytest.raises(ValueError, match=message):
        model.train()


def test_blocks_that_moved_with_their_list_are_no_reason_to_refuse():
    model = torchsbp.apply(tiny_vit().double())
    model.blocks = nn.Sequential(*model.blocks, nn.Identity())
    step(model.train(), images())


def test_a_patched_model_that_is_let_go_is_gone_at_once():
    model = torchsbp.apply(tiny_vit())
    step(model.train(), images().float())
    gone = weakref.ref(model.blocks[1].mlp.fc1.weight)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("change", ["shortened", "switched off", "wrapped", "compiled"])
def test_blocks_that_are_gone_or_wrapped_are_no_reason_to_refuse(change):
    model = torchsbp.apply(tiny_vit().double())
    step(model, images())
    if change == "shortened":
        model.blocks = model.blocks[:2]
    else:
        how = {"switched off": lambda block: nn.Identity(), "wrapped": checkpoint_wrapper, "compiled": torch.compile}
        model.blocks[2] = how[change](model.blocks[2])
    model.train()
    assert list(torchsbp.kept(model)) == ["blocks.1", "blocks.2"]


def test_a_model_that_was_shortened_can_be_checked():
    model = torchsbp.apply(tiny_vit().double(), 0.5)
    model.blocks = model.blocks[:2]
    assert torchsbp.check(model, images()).passed


def test_a_part_that_was_wrapped_is_trained():
    model = torchsbp.apply(TOKENS["differential attention"].model(), 0.5)
    model.blocks[1].attn = checkpoint_wrapper(model.blocks[1].attn)
    model.train()


def test_a_block_that_appears_twice_is_refused():
    model = tiny_vit()
    model.blocks[1] = model.blocks[2]
    with pytest.raises(ValueError, match=r"blocks.2 is the same module as blocks.1"):
        torchsbp.apply(model)
    assert not any(isinstance(m, Site) for m in model.modules())


@pytest.mark.parametrize(
    "block, rule, allowed",
    [("ParallelThingsBlock", "qkv", "'query'$"), ("ResPostBlock", "head", "'query', 'qkv', 'exact'$")],
)
def test_rules_that_a_block_does_not_have(block, rule, allowed):
    message = rf"(?m)blocks.1: attention='{rule}' is not allowed here; allowed: {allowed}"
    with pytest.raises(ValueError, match=message):
        torchsbp.apply(tiny_vit(block_fn=getattr(timm.models.vision_transformer, block)), attention=rule)


def test_bad_samplers_and_schedules():
    model = torchsbp.apply(tiny_vit().train(), 0.5, sampler=lambda shape, ratios, key: torch.arange(24))
    with pytest.raises(ValueError, match=r"the sampler must give an int64 order of shape \(6, 24\).*it gave"):
        model(images().float())
    schedule = schedules.Milestones(((0, 0.5), (100, [0.5, 0.5, 0.5])))
    refuse({"keep_ratio": schedule}, ValueError, r"lists 3 ratios for 2 SBP blocks")


def test_an_error_in_the_second_backbone_leaves_the_first_alone():
    model = nn.ModuleList([tiny_vit(), tiny_vit(depth=6)])
    with pytest.raises(ValueError, match=r"lists 2 ratios for 3 SBP blocks|lists 3 ratios for 2 SBP blocks"):
        torchsbp.apply(model, keep_ratio=[0.5, 0.5, 0.5])
    assert not any(isinstance(m, Site) for m in model.modules())


def test_attention_mask_is_refused_in_training():
    model = torchsbp.apply(tiny_vit(img_size=32), 0.5)
    x = torch.randn(2, 5, 24)
    mask = torch.ones(5, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"called with extra arguments in training"):
        model.blocks[0](x, attn_mask=mask)
    model.eval()
    assert model.blocks[0](x, attn_mask=mask).shape == x.shape


def test_image_too_small_for_the_mask():
    model = tiny_convnext().double().train()
    torchsbp.apply(model, keep_ratio=0.1)
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)  # 2×2 positions in stage 3
    with pytest.raises(ValueError, match=r"image too small for the mask: ratio 0.1 keeps none of the 4 cells"):
        model(x)
    assert entry_of(model).sbp_step == 0
    with pytest.raises(RuntimeError, match="there are no kept positions yet"):
        torchsbp.kept(model)
    step(model, torch.randn(1, 3, 64, 64, dtype=torch.float64))


def test_dropped_tokens_are_refused():
    model = torchsbp.apply(tiny_vit(patch_drop_rate=0.5).train(), 0.5)
    with pytest.raises(ValueError, match=r"blocks.1 was given 3 samples of 13 pos.*patch_drop_rate.*keep_ratio=1"):
        model(images().float())
    step(torchsbp.apply(torchsbp.remove(model), keep_ratio=1), images().float())  # nothing is sampled


def test_blocks_alone_are_refused():
    model = torchsbp.apply(tiny_vit().train(), 0.5)
    with pytest.raises(RuntimeError, match=r"ran before the model's patch embedding or stem"):
        model.blocks(torch.randn(2, 25, 24))

"""Arguments that are not what they must be: a message names argument, value and way out."""

import pytest
import torch
from torch import nn

import torchsbp
from torchsbp import SBPConfig, schedules
from torchsbp.errors import UsageError
from torchsbp.patching.site import Site

from .models import tiny_vit

X, LAYER = torch.zeros(2, 8, 4), nn.Linear(4, 4)
IMAGES, SHAPE = torch.zeros(2, 3, 32, 32), (2, 3, 32, 32)
NOT_A_MODEL = r"^model=None is of type NoneType; allowed: a torch.nn.Module"


def vit(**options) -> nn.Module:
    return torchsbp.apply(tiny_vit(img_size=32), **{"keep_ratio": 0.5} | options)


def sizes(its=((32, 32), (16, 32)), padded=(32, 32)) -> None:
    torchsbp.set_sizes(vit(scale="none"), its, padded)


def of_one(shape, ratios, key):
    return torch.zeros(len(key), 4, dtype=torch.int64)


CALLS = {
    "config, a name": (lambda: vit(config="paper"), r"config='paper' is the name of a preset; use config=SBPConfig.pr"),
    "config, a dict": (lambda: vit(config={"seed": 1}), r"config={'seed': 1} is a dict; use config=SBPConfig\(\*\*…\)"),
    "config, a number": (lambda: vit(config=0.5), r"config=0.5 is of type float; allowed: None, an SBPConfig"),
    "config, by position": (lambda: torchsbp.apply(tiny_vit(), SBPConfig()), r"keep_ratio is given an SBPConfig; pass"),
    "a preset's options": (lambda: SBPConfig.preset("paper", ratio=1), r"unknown option ratio; allowed: keep_ratio, "),
    "apply": (lambda: torchsbp.apply(None), NOT_A_MODEL),
    "apply, a class": (lambda: torchsbp.apply(nn.Linear), r"model=<class .*Linear'> is of type type; allowed: a torch"),
    "remove": (lambda: torchsbp.remove(None), NOT_A_MODEL),
    "kept": (lambda: torchsbp.kept(None), NOT_A_MODEL),
    "set_step": (lambda: torchsbp.set_step(vit(), 2**64), r"step must be an integer >= 0 \(below 2\*\*63\), got 18446"),
    "set_sizes, ragged": (lambda: sizes([(32, 32), (32,)]), r"sizes=\[\(32, 32\), \(32,\)\] is not allowed; allowed: "),
    "set_sizes, nothing": (lambda: sizes(None), r"sizes=None is not allowed; allowed: \(height, width\) of every im"),
    "set_sizes, bytes": (lambda: sizes(torch.full((2, 2), 32).byte()), r"sizes=tensor.* is not allowed; allowed: "),
    "set_sizes, a mask": (lambda: sizes(torch.ones(2, 2).bool()), r"sizes=tensor.* is not allowed; allowed: "),
    "set_sizes, one side": (lambda: sizes(padded=32), r"padded=32 is not allowed; allowed: \(height, width\) of the b"),
    "set_sizes, half a pixel": (lambda: sizes(padded=(32.5, 32)), r"padded=\(32.5, 32\) is not allowed; .*whole numb"),
    "set_sizes, no side": (lambda: sizes(padded=("a", 32)), r"padded=\('a', 32\) is not allowed; .*whole numbers"),
    "check": (lambda: torchsbp.check(None, IMAGES), NOT_A_MODEL),
    "check, not patched": (
        lambda: torchsbp.check(tiny_vit(), IMAGES),
        r"model is not patched \(timm.*VisionTransformer\): call torchsbp.apply\(model\) first",
    ),
    "check, no inputs": (lambda: torchsbp.check(vit()), r"the model does not run on inputs=\[\]: .*missing 1 required"),
    "check, other inputs": (lambda: torchsbp.check(vit(), IMAGES[:, :1]), r"does not run on inputs=\[\(2, 1, 32, 32\)"),
    "sbp, a ratio": (
        lambda: torchsbp.sbp(LAYER, X, 0.5, 1),
        r"keep=0.5 is of type float; allowed: a tensor of the positions to keep, such as torch.randperm\(8\)\[:4\]",
    ),
    "sbp, a list": (lambda: torchsbp.sbp(LAYER, X, [1]), r"keep=\[1\] is of type list; .* torch.tensor\(\[0, 7\]\)"),
    "sbp, x": (lambda: torchsbp.sbp(LAYER, [1], torch.arange(2)), r"x=\[1\] is of type list; allowed: a tensor"),
    "sbp, fn": (lambda: torchsbp.sbp(None, X, torch.arange(2)), r"fn=None can't be called; allowed: a function or mod"),
    "sbp, dim": (lambda: torchsbp.sbp(LAYER, X, torch.arange(2), 7), r"dim=7 is not a dimension of x, .*\(2, 8, 4\)"),
    "sbp, too many": (lambda: torchsbp.sbp(LAYER, X, torch.arange(9)), r"keep has 9 positions, x has 8 along dim 1"),
    "sbp, device": (
        lambda: torchsbp.sbp(LAYER, X, torch.arange(2, device="meta")),
        r"keep is on meta, x on cpu; use keep.to\(x.device\)",
    ),
    "estimate, a ratio": (lambda: torchsbp.estimate(vit(), SHAPE, 0.5), r"config=0.5 is a number; .*SBPConfig\(0.5\)"),
    "estimate, a preset": (lambda: torchsbp.estimate(vit(), SHAPE, "fast"), r"config='fast' is the name of a preset; "),
    "estimate, a batch": (lambda: torchsbp.estimate(vit(), 64), r"input_shape=64 is not allowed; .*\(64, 3, 224, 224"),
    "estimate, half": (lambda: torchsbp.estimate(vit(), (2.5, 3, 32, 32)), r"input_shape=\(2.5, 3, 32, 32\) is not"),
    "estimate, nothing": (lambda: torchsbp.estimate(lambda: None, SHAPE), r"model\(\)=None is of type NoneType; allow"),
    "estimate, loss": (lambda: torchsbp.estimate(vit(), SHAPE, loss=3), r"loss=3 can't be called; allowed: None, a fu"),
    "estimate, loss of all": (
        lambda: torchsbp.estimate(vit(), SHAPE, loss=lambda y: y),
        r"loss gave a tensor of shape \(2, \d+\); it must give one number with a gradient",
    ),
    "plan, configs": (lambda: torchsbp.plan(vit(), SHAPE, "1GiB", configs=[0.5]), r"config=0.5 is a number; a keep-ra"),
    "plan, no configs": (lambda: torchsbp.plan(vit(), SHAPE, "1GiB", configs=[]), r"configs is empty; allowed: None, "),
    "plan, one": (lambda: torchsbp.plan(vit(), SHAPE, "1GiB", configs=SBPConfig()), r"configs=SBPConfig\(keep_ratio="),
    "plan, headroom": (lambda: torchsbp.plan(vit(), SHAPE, "1GiB", headroom="x"), r"headroom='x' is not allowed; allo"),
    "measure": (lambda: torchsbp.measure(None, print), NOT_A_MODEL),
    "measure, step": (lambda: torchsbp.measure(vit(), 3), r"step=3 can't be called; allowed: a function that runs for"),
    "sampler gives nothing": (
        lambda: vit(sampler=lambda shape, ratios, key: None)(IMAGES),
        r"sampler must give an int64 order of shape \(4, 4\), .*grid \(2, 2\) .*; it gave None of type NoneType",
    ),
    "sampler repeats": (lambda: vit(sampler=of_one)(IMAGES), r"each once; it gave some more than once, or others"),
    "sampler of one argument": (
        lambda: vit(sampler=lambda shape: None),
        r"sampler must be a function of \(shape, ratios, key\), found one of \(shape\)",
    ),
    "sampler, a list": (lambda: vit(sampler=["grid"]), r"unknown sampler \['grid'\]; use one of"),
    "blocks": (lambda: vit(blocks=object()), r"blocks=<object .* is not allowed; use None"),
    "blocks, a mask": (lambda: vit(blocks=[False, True, True]), r"blocks=\[False, True, True\] is not allowed; use No"),
    "blocks, a filter": (lambda: vit(blocks=lambda name: True), r"blocks must be a function of \(name, module\), foun"),
    "an empty batch": (lambda: vit()(IMAGES[:0]), r"batch is empty \(input of shape \(0, 3, 32, 32\)\): .* skip it"),
    "frames, a step that is true": (
        lambda: torchsbp.sbp_frames(LAYER, torch.ones(1, 4, 2), 0.5, step=True),
        r"step=True is of type bool; allowed: the number of the training step",
    ),
    "frames": (lambda: torchsbp.sbp_frames(LAYER, 3, step=0), r"video=3 is of type int; allowed: a tensor \[batch, fr"),
    "frames, ratio": (lambda: torchsbp.sbp_frames(LAYER, X, "fast", step=0), r"keep_ratio='fast' suits a mod"),
    "frames, step": (lambda: torchsbp.sbp_frames(LAYER, X, step=None), r"step=None is of type NoneType; allowed: the "),
    "frames, chunk": (lambda: torchsbp.sbp_frames(LAYER, X, step=0, chunk=0), r"chunk=0 is not allowed; allowed: None"),
    "frames, a grid": (
        lambda: torchsbp.sbp_frames(LAYER, X, 0.6, step=0, sampler="grid"),
        r"sampler='grid' keeps the same positions of all frames, hence all frames or none; allowed here: 'random', 's",
    ),
    "frames, a list of features": (
        lambda: torchsbp.sbp_frames(lambda frames: [frames], X, step=0),
        r"encoder\(frames\)=\[tensor.* is of type list; allowed: a tensor with one row for every frame",
    ),
    "frames, one for all": (
        lambda: torchsbp.sbp_frames(lambda frames: frames.sum(0), X, step=0),
        r"one row for every frame: of 8 frames, an input of shape \(8, 4\), it made \(4,\)",
    ),
    "frames, sampler": (
        lambda: torchsbp.sbp_frames(LAYER, X, step=0, sampler=lambda *of: torch.arange(5)[None]),
        r"sampler must give an int64 order of shape \(1, 8\).*; it gave torch.int64 of shape \(1, 5\)",
    ),
    "milestones": (lambda: schedules.Milestones(3), r"points must be \(step, ratio\) pairs, found 3"),
    "ramp": (lambda: schedules.ramp(0.5, steps="x"), r"steps must be an integer, found 'x' of type str"),
}  # fmt: skip


@pytest.mark.parametrize("call, message", CALLS.values(), ids=CALLS)
def test_the_message_names_argument_value_and_way_out(call, message):
    with pytest.raises(UsageError, match=message):
        call()


@pytest.mark.parametrize("options", [{"config": "paper"}, {"config": {}}, {"blocks": 3}, {"sampler": print}], ids=str)
def test_a_refused_apply_leaves_the_model_as_it_was(options):
    model = tiny_vit()
    with pytest.raises(UsageError):
        torchsbp.apply(model, attention=1, **options)
    assert not any(isinstance(module, Site) for module in model.modules())
    assert "sbp_step" not in dict(model.named_buffers())


def test_an_empty_batch_is_the_models_own_business_in_eval_mode():
    assert vit().eval()(IMAGES[:0]).shape[0] == 0


def test_a_mistake_at_the_wrong_time_is_ours_and_a_runtime_error():
    with pytest.raises(RuntimeError, match="no forward has run") as caught:
        torchsbp.kept(vit())
    assert isinstance(caught.value, UsageError)

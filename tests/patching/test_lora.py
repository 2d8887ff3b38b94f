"""LoRA through peft: the adapters get the gradients of the oracle, in either order of apply and get_peft_model."""

import copy

import pytest
import torch
from torch import nn

import torchsbp
from torchsbp import SBPConfig
from torchsbp.patching.replay import Residual
from torchsbp.patching.site import patched_modules

from ..models import LEAN, PYRAMIDS, TOKENS, WINDOWS, images
from ..oracle import check_definition, check_rule
from ..steps import assert_gradients, distance, gradients_of, step

peft = pytest.importorskip("peft")

LAYERS = r".*\.(qkv|attn\.proj|fc1|fc2)"


def adapted(model: nn.Module, **options) -> nn.Module:
    torch.manual_seed(0)
    options = {"target_modules": LAYERS, "init_lora_weights": False} | options  # B is not at its initial zero
    return peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, modules_to_save=["head"], **options))


@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("rule", ["query", "qkv", "head"])
def test_gradients_equal_the_oracle(rule, ratio):
    check_rule(adapted(LEAN["vit"].model()), SBPConfig(keep_ratio=ratio, attention=rule), images())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_gradients_equal_the_oracle_on_a_gpu(name):
    check_definition(adapted(LEAN[name].model()).cuda(), SBPConfig(keep_ratio=0.5), images().cuda())


@pytest.mark.parametrize("name", ["convnext", "convnext 1×1 conv, drop path"])
def test_convnext_equals_the_oracle(name):
    check_definition(adapted(LEAN[name].model()), SBPConfig(keep_ratio=0.5), images())


@pytest.mark.parametrize("layers", [LAYERS, r".*\.qkv"])
@pytest.mark.parametrize("name", ["eva02", "beit"])
def test_adapters_that_the_model_leaves_out_take_no_part(name, layers):
    """With biases of their own, timm's attention reads the weight of qkv and does not call the layer."""
    check_definition(adapted(TOKENS[name].model(), target_modules=layers), SBPConfig(0.5), TOKENS[name].images())
    model = adapted(torchsbp.apply(TOKENS[name].model(), 0.5))  # too late
    with pytest.raises(ValueError, match=r"attn.qkv is a LoRA layer, of which this block uses the weight alone"):
        model(TOKENS[name].images())


@pytest.mark.parametrize("layer", ["qkv", "proj"])
@pytest.mark.parametrize("name", ["torchvision swin", "torchvision swin v2", "video swin, own norm"])
def test_adapters_that_torchvision_leaves_out_are_refused(name, layer):
    model = adapted(WINDOWS[name].model(), target_modules=rf".*\.{layer}")
    with pytest.raises(ValueError, match=rf"attn.{layer} is peft.tuners.lora.layer.Linear; supported: torch.nn"):
        torchsbp.apply(model, 0.5)


@pytest.mark.parametrize("layer", ["qkv", "proj"])
def test_adapters_that_torchvision_leaves_out_are_refused_later_too(layer):
    model = adapted(torchsbp.apply(WINDOWS["torchvision swin"].model(), 0.5), target_modules=rf".*\.{layer}")
    with pytest.raises(ValueError, match=rf"attn.{layer} is a LoRA layer, of which this block uses the weight alone"):
        model(WINDOWS["torchvision swin"].images())


def test_where_a_second_run_reads_weights():
    """MambaOut's second run takes a part of fc1 only; that of SAM would leave the adapters of qkv out."""
    check_definition(adapted(PYRAMIDS["mambaout"].model()), SBPConfig(keep_ratio=0.5), PYRAMIDS["mambaout"].images())
    with pytest.raises(ValueError, match=r"attn.qkv is peft.tuners.lora.layer.Linear; supported: torch.nn"):
        torchsbp.apply(adapted(PYRAMIDS["sam"].bare()), 0.5)


def test_a_layer_in_which_rows_meet_is_adapted_before():
    """Around ResMLP's patched layer, LoRA would take kept rows for all."""
    tiny, layers = TOKENS["resmlp"], {"target_modules": r".*\.linear_tokens"}
    check_definition(adapted(tiny.model(), **layers), SBPConfig(keep_ratio=0.5), tiny.images())
    model = adapted(torchsbp.apply(tiny.model(), 0.5), **layers)
    with pytest.raises(ValueError, match=r"linear_tokens is a Linear that was not patched with the block"):
        model.train()


def test_two_adapters_equal_the_oracle():
    model = adapted(LEAN["vit"].model())
    model.add_adapter("more", peft.LoraConfig(r=2, target_modules=["fc1"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "more"])
    check_definition(model, SBPConfig(keep_ratio=0.5), images())


def test_the_order_does_not_matter_and_only_adapters_train():
    after = torchsbp.apply(adapted(LEAN["vit"].model()), keep_ratio=0.5)
    before = adapted(torchsbp.apply(LEAN["vit"].model(), keep_ratio=0.5))
    (_, found), (_, expected) = step(before, images()), step(after, images())
    assert_gradients(found, expected)
    assert all("lora" in name or "head" in name for name in found)
    assert len(found) == 3 * 4 * 2 + 2


def test_merged_into_the_plain_model():
    """What was trained is merged and unloaded as from any other model."""
    model = torchsbp.apply(adapted(LEAN["vit"].model()), keep_ratio=0.5)
    step(model, images())
    expected = model.eval()(images())
    plain = torchsbp.remove(model).merge_and_unload()
    torch.testing.assert_close(plain(images()), expected, rtol=1e-10, atol=1e-10)


def test_disabled_adapters_take_no_part():
    plain = adapted(LEAN["vit"].model())
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=1.0)
    with plain.disable_adapter(), model.disable_adapter():
        torch.testing.assert_close(model(images()), plain(images()), rtol=1e-12, atol=1e-12)


def test_autocast_forms_the_weight_in_full_precision():
    plain = adapted(LEAN["vit"].model().float())
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=1.0)
    x = images().float()
    _, exact = step(plain, x)
    with torch.autocast("cpu", torch.bfloat16):
        (_, found), (_, expected) = step(model, x), step(plain, x)
    assert distance(found, exact) <= 1.5 * distance(expected, exact)


def test_a_half_precision_weight_is_not_summed():
    """Its rounding step is larger than a young adapter's B·A: the forward pass would not see the adapter."""
    model = torchsbp.apply(adapted(LEAN["vit"].model().bfloat16()), 0.5)
    assert any(isinstance(module.sbp, Residual) for _, module in patched_modules(model))
    model = torchsbp.apply(adapted(LEAN["vit"].model().float()), 0.5).bfloat16()
    message = r"attn.qkv has a torch.bfloat16 weight, in whose rounding small adapters vanish; keep"
    with pytest.raises(ValueError, match=message):
        model(images().bfloat16())


def test_compiled_gradients_are_those_of_eager():
    torch._dynamo.reset()
    eager = torchsbp.apply(adapted(LEAN["vit"].model(depth=1)), keep_ratio=0.5)
    model = copy.deepcopy(eager)
    torch.compile(model, fullgraph=True, backend="aot_eager")(images()).square().sum().backward()
    eager(images()).square().sum().backward()
    assert_gradients(gradients_of(model), gradients_of(eager))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"use_dora": True}, r"attn.qkv is a DoraLinearVariant; supported: LoRA without variants"),
        ({"lora_bias": True}, r"attn.qkv has a LoRA bias; supported: lora_bias=False"),
    ],
    ids=str,
)
def test_what_is_not_one_weight_is_run_by_its_own_forward(options, message):
    check_definition(adapted(LEAN["vit"].model(), **options), SBPConfig(keep_ratio=0.5), images())
    model = adapted(torchsbp.apply(LEAN["vit"].model(), 0.5), **options)  # too late, and nobody calls train()
    with pytest.raises(ValueError, match=f"SBPBlock was changed after torchsbp.apply: {message}"):
        model(images())


def test_other_adapters():
    ia3 = peft.IA3Config(target_modules=["qkv"], feedforward_modules=[])
    check_definition(peft.get_peft_model(LEAN["vit"].model(), ia3), SBPConfig(keep_ratio=0.5), images())
    model = peft.get_peft_model(torchsbp.apply(LEAN["vit"].model(), 0.5), ia3)
    with pytest.raises(ValueError, match=r"attn.qkv is peft.tuners.ia3.layer.Linear; supported: .*peft's LoRA"):
        model(images())


def test_dropout_and_merged_adapters_are_refused():
    with pytest.raises(ValueError, match=r"attn.qkv.lora_dropout.default is Dropout\(p=0.1\), which is not supported"):
        torchsbp.apply(adapted(LEAN["vit"].model(), lora_dropout=0.1))
    model = adapted(torchsbp.apply(LEAN["vit"].model(), 0.5), lora_dropout=0.1)
    with pytest.raises(ValueError, match=r"attn.qkv has LoRA dropout 0.1; supported: lora_dropout=0"):
        model(images())
    model = adapted(torchsbp.apply(LEAN["vit"].model(), 0.5))
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"attn.qkv has its adapters merged .*unmerge them first"):
        model(images())

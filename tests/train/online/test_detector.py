"""Encoder and temporal model together: which gradients are exact, and which frames the encoder learns from."""

import copy

import pytest
import torch
from torch import Tensor

from torchsbp import SBPConfig
from torchsbp.errors import UsageError
from torchsbp.ops.reference import gate
from torchsbp.patching.check import install_gates
from torchsbp.train.data.window import Window
from torchsbp.train.online.detector import OnlineDetector, WorkFirst

from .models import detector, detector_of_tokens, video

WINDOW = Window(long=6, long_rate=1, work=4)
EMPTY = torch.tensor([[True, True, False, False, False, False], [False] * 6])


def gradients(model: OnlineDetector, clip: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    logits = model(clip, EMPTY)
    (logits.log_softmax(-1) * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return {name: its.grad.clone() for name, its in model.named_parameters() if its.grad is not None}


def sampled(ratio: float, step: int = 0, **config) -> OnlineDetector:
    model = detector(WINDOW, **config)
    model.apply_sbp(SBPConfig(keep_ratio=ratio, sampler="frames", per_sample=False, seed=3))
    model.set_step(step)
    return model


def kept_frames(model: OnlineDetector, clip: Tensor) -> Tensor:
    """Found by the gradients that reach features, one number for each frame of the batch."""
    features = model.encode(clip)
    (graph,) = torch.autograd.grad(features.sum(), [model.encoder.body[0].bias], retain_graph=True)
    assert graph.abs().sum() > 0
    found = []
    for frame in range(clip.shape[1]):
        (grad,) = torch.autograd.grad(features[:, frame].sum(), [model.encoder.body[0].bias], retain_graph=True)
        found.append(bool(grad.abs().sum() > 0))
    return torch.tensor(found).nonzero().flatten()


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("ratio", [0.2, 0.5, 1.0])
def test_the_temporal_model_s_gradients_are_exact_and_the_encoder_s_those_of_kept_frames(ratio, checkpoint):
    clip = video(2, 10)
    model, full = sampled(ratio, checkpoint=checkpoint), detector(WINDOW)
    keep = kept_frames(model, clip)
    assert len(keep) == 10 * ratio
    found, exact = gradients(model, clip), gradients(full, clip)
    oracle = detector(WINDOW)
    encode = oracle.encode
    rows = (keep + 10 * torch.arange(2)[:, None]).flatten()
    oracle.encode = lambda frames: gate(encode(frames), rows)
    expected = gradients(oracle, clip)
    assert found.keys() == expected.keys() == exact.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-12)
        if name.startswith("temporal.") or ratio == 1:
            torch.testing.assert_close(found[name], exact[name], rtol=1e-10, atol=1e-12)
        else:
            assert not torch.allclose(found[name], exact[name])


@pytest.mark.parametrize("kept", ["window", "work"])
@pytest.mark.parametrize("per_sample", [False, True])
def test_tokens_within_kept_frames_get_the_gradients_of_the_oracle(per_sample, kept):
    clip = video(2, 10)
    model, oracle = (detector_of_tokens(WINDOW, tokens=0.5, kept=kept) for _ in range(2))
    plain = copy.deepcopy(oracle.encoder)
    model.apply_sbp(SBPConfig(keep_ratio=0.2, seed=3, per_sample=per_sample))
    model.set_step(5)
    entering: list[Tensor] = []
    model.encoder.register_forward_pre_hook(lambda _, args: entering.append(args[0]))
    found = gradients(model, clip)
    same = (clip.flatten(0, 1)[:, None] == entering[-1]).flatten(2).all(2)  # kept frames enter after the others
    rows = same.nonzero()[same.nonzero()[:, 1].argsort(), 0]
    assert (rows // 10).tolist() == [0, 0, 1, 1]
    install_gates(oracle.encoder.body, model.encoder.body)

    def encode(video: Tensor) -> Tensor:
        with torch.no_grad():
            features = plain(video.flatten(0, 1))
        return features.index_put((rows,), oracle.encoder(video.flatten(0, 1)[rows])).unflatten(0, video.shape[:2])

    oracle.encode = encode
    expected = gradients(oracle, clip)
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-12)
    exact = gradients(detector_of_tokens(WINDOW), clip)
    assert all(torch.allclose(found[name], exact[name], rtol=1e-10) == name.startswith("temporal.") for name in found)


def test_forward_is_that_of_full_backprop():
    clip = video(2, 10)
    torch.testing.assert_close(sampled(0.2)(clip, EMPTY), detector(WINDOW)(clip, EMPTY), rtol=1e-12, atol=1e-12)


def test_frames_follow_the_step():
    clip = video(1, 10)
    found = {tuple(kept_frames(sampled(0.2, step), clip).tolist()) for step in range(20)}
    assert found == {(i, i + 5) for i in range(5)}


@pytest.mark.parametrize("ratio, kept", [(0.2, {(6, 8), (7, 9)}), (0.5, {(i, 6, 7, 8, 9) for i in range(6)})])
def test_frames_of_the_work_memory_first(ratio, kept):
    """Two of its four; all of them and one of the long memory."""
    clip = video(1, 10)
    assert {tuple(kept_frames(sampled(ratio, step, kept="work"), clip).tolist()) for step in range(60)} == kept


def test_by_default_each_clip_keeps_frames_of_its_own():
    """Also where those of the work memory come first: their order is none that could be balanced."""
    window, work = detector(WINDOW), detector(WINDOW, kept="work")
    for model in (window, work):
        model.apply_sbp(SBPConfig(keep_ratio=0.2))
    assert (window.sbp.sampler, window.sbp.per_sample) == ("random", "balanced")
    assert (work.sbp.sampler, work.sbp.per_sample) == (WorkFirst("random", 4), True)
    assert len(kept_frames(window, video(5, 10))) == 10
    assert kept_frames(work, video(20, 10)).tolist() == [6, 7, 8, 9]


def test_frames_of_the_work_memory_of_each_clip():
    order = WorkFirst("frames", work=4)((10, 1, 1), (0.2,), torch.arange(32))
    assert {tuple(its) for its in order[:, :2].sort(dim=1).values.tolist()} == {(6, 8), (7, 9)}
    assert torch.equal(order.sort(dim=1).values, torch.arange(10).expand(32, 10))


def test_under_autocast_every_weight_learns():
    """Weights are cast once for all chunks: first with gradients, or none would reach them."""
    model = sampled(0.2).float()
    with torch.autocast("cpu", torch.bfloat16):
        model(video(2, 10), EMPTY).square().sum().backward()
    assert all(its.grad is not None and its.grad.abs().sum() > 0 for its in model.encoder.body[0].parameters())


def test_batch_norms_are_frozen():
    model = detector(WINDOW)
    before = copy.deepcopy(model.encoder.state_dict())
    found = gradients(model.train(), video(2, 10))
    assert "encoder.body.0.weight" in found
    assert not any(name.startswith("encoder.body.2.") for name in found)
    assert all(torch.equal(value, before[name]) for name, value in model.encoder.state_dict().items())


def test_a_frozen_encoder_gets_no_gradients():
    assert all(name.startswith("temporal.") for name in gradients(detector(WINDOW, frozen=True), video(2, 10)))
    with pytest.raises(UsageError, match=r"task.encoder.frozen leaves SBP nothing to do"):
        sampled(0.2, frozen=True)
    with pytest.raises(UsageError, match=r"task.encoder.checkpoint does nothing for an encoder that is frozen"):
        detector(WINDOW, frozen=True, checkpoint=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own look at features that come from the encoder
def test_compiled_it_is_the_same():
    clip = video(2, 10)
    expected, model = gradients(sampled(0.2), clip), sampled(0.2)
    model.compile(backend="aot_eager")
    found = gradients(model, clip)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "config, message",
    [
        (SBPConfig(keep_ratio=(0.2, 0.5)), r"sbp.keep_ratio=\(0.2, 0.5\) varies over depth; frames have one ratio"),
        (SBPConfig(), r"sbp.keep_ratio='default' suits a model's family, and here is none; give a number in"),
        (SBPConfig(0.5, attention="qkv"), r"sbp.attention is about tokens within frames: set task.encoder.tokens"),
    ],
)
def test_what_frames_have_no_use_for_is_refused(config, message):
    with pytest.raises(UsageError, match=message):
        detector(WINDOW).apply_sbp(config)

"""Frame encoders: a model of timm or torchvision without its classifier, batch norms frozen."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from torch import Tensor, nn
from torchvision.models import get_model

from ...errors import UsageError
from ..data.seeds import generators_kept
from ..ranges import COUNT, NOT_NEGATIVE, SHARE_ABOVE_0
from ..runs.weights import check_fit, classifiers, read_weights

TORCHVISION = "torchvision/"
OURS = "encoder.body."
"""prefix of the encoder's weights in checkpoints of ours"""


@dataclass
class Encoder:
    """Which model sees the frames, and how it is trained."""

    name: str = "resnet50"
    """a model of timm, or torchvision/NAME for one of torchvision's"""
    options: dict[str, Any] = field(default_factory=dict)
    """further arguments of the model"""
    pretrained: bool = False
    """begin from timm's published weights (needs the internet)"""
    weights: Path | None = None
    """begin from this file: weights of the same model, with or without its classifier, or a checkpoint of ours"""
    frozen: bool = False
    """don't train the encoder: the usual practice, for a baseline"""
    lr: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """the encoder's learning rate; if it is not set, optimizer.lr, which the temporal model always has"""
    warmup_epochs: float = field(default=0.0, metadata=NOT_NEGATIVE)
    """epochs over which the encoder's learning rate rises from 0"""
    chunk: int = field(default=256, metadata=COUNT)
    """how many frames are encoded at a time where no gradients are needed, or with checkpoint"""
    checkpoint: bool = False
    """keep no activations for backward, but compute them again there, one chunk of frames at a time"""
    kept: Literal["window", "work"] = "window"
    """sbp: sample from all frames, or first from those of the work memory, where nearly all of the gradient is"""
    tokens: float | None = field(default=None, metadata=SHARE_ABOVE_0)
    """sbp: the keep-ratio of tokens within kept frames; if it is not set, all tokens are kept"""

    def __post_init__(self) -> None:
        useless = [name for name in ("checkpoint", "warmup_epochs", "tokens") if getattr(self, name)]
        if self.frozen and useless:
            raise UsageError(f"task.encoder.{useless[0]} does nothing for an encoder that is frozen: leave it out")


class FrameEncoder(nn.Module):
    """Maps 8-bit frames ``[n, 3, H, W]`` to features ``[n, D]``.

    Batch norms use the statistics they have and are not trained, since frames of a batch are no independent images.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, body: nn.Module, mean: Sequence[float], std: Sequence[float], frozen: bool) -> None:
        super().__init__()
        self.body, self.frozen = body, frozen
        self.norms = [its for its in body.modules() if isinstance(its, nn.modules.batchnorm._BatchNorm)]
        for part in [body] if frozen else self.norms:
            part.requires_grad_(False)
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, 255 * torch.tensor(values).view(-1, 1, 1), persistent=False)
        self.train()

    def train(self, mode: bool = True) -> "FrameEncoder":
        super().train(mode and not self.frozen)
        for norm in self.norms:
            norm.eval()
        return self

    def forward(self, frames: Tensor) -> Tensor:
        return self.body((frames - self.mean) / self.std)


def make_encoder(config: Encoder, size: int, mean: Sequence[float], std: Sequence[float], start: bool) -> FrameEncoder:
    """Make the encoder; with ``start``, load the weights that training begins from."""
    body, head = of_torchvision(config) if config.name.startswith(TORCHVISION) else of_timm(config, start)
    if config.weights is not None and start:
        found = {name.removeprefix(OURS): value for name, value in read_weights(config.weights).items()}
        others = tuple(f"{name}." for name in (*head, "temporal"))
        fitting = {name: value for name, value in found.items() if not name.startswith(others)}
        check_fit(body.state_dict(), fitting, set(), str(config.weights))
        body.load_state_dict(fitting)
    encoder = FrameEncoder(body, mean, std, config.frozen)
    width(encoder, size, config.name)  # raises if frames of this size don't fit
    return encoder


def of_timm(config: Encoder, start: bool) -> tuple[nn.Module, Sequence[str]]:
    """Return the model without its classifiers, and their names."""
    try:
        pretrained = config.pretrained and start
        body = timm.create_model(config.name, pretrained=pretrained, num_classes=0, **config.options)
    except Exception as error:  # an unknown name, an option it does not have, a value it can't use
        raise UsageError(f"task.encoder.name {config.name} with {config.options}: {error}") from error
    return body, classifiers(body)


def of_torchvision(config: Encoder) -> tuple[nn.Module, Sequence[str]]:
    if config.pretrained:
        raise UsageError("task.encoder.pretrained is timm's; give torchvision's weights as task.encoder.weights")
    try:
        body = get_model(config.name.removeprefix(TORCHVISION), weights=None, **config.options)
    except Exception as error:
        raise UsageError(f"task.encoder.name {config.name} with {config.options}: {error}") from error
    head = next((name for name, its in reversed(list(body.named_modules())) if isinstance(its, nn.Linear)), None)
    if head is None:
        raise UsageError(f"task.encoder.name {config.name} has no linear classifier to leave out; use another model")
    body.set_submodule(head, nn.Identity())
    return body, [head]


@torch.no_grad()
def width(encoder: FrameEncoder, size: int, name: str) -> int:
    """Return the width of the features, found by encoding a black frame."""
    device = encoder.mean.device
    try:
        with generators_kept():
            features = encoder.eval()(torch.zeros(1, 3, size, size, dtype=torch.uint8, device=device))
    except Exception as error:  # an assertion of the model, or whatever a layer raises
        raise UsageError(
            f"task.data.size={size} does not fit task.encoder.name {name}: {error}. Set task.data.size to the model's, "
            f"or task.encoder.options.img_size={size} if it has that option"
        ) from error
    encoder.train()
    if features.dim() != 2:
        raise UsageError(f"task.encoder.name {name} gives features {tuple(features.shape)}; allowed: [frames, width]")
    return features.shape[1]

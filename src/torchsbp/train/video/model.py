"""Classifiers of clips: a body of torchvision, transformers or timm, and one linear layer on its features."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torchvision.models.video.swin_transformer import SwinTransformer3d

from torchsbp import SBPConfig

from ...errors import UsageError
from ...ops.frames import in_chunks
from ..data.seeds import generators_kept
from ..frames import check_frames_alone, sampled_frames
from ..ranges import COUNT, NOT_NEGATIVE, SHARE_BELOW_1, refuse
from ..runs.weights import check_fit, read_weights
from .inflate import inflated
from .pool import Mean, Time
from .pretrained import named_now

TRANSFORMERS = "transformers/"
SWIN = {
    "swin3d_t": {"embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24]},
    "swin3d_s": {"embed_dim": 96, "depths": [2, 2, 18, 2], "num_heads": [3, 6, 12, 24]},
    "swin3d_b": {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32]},
}
"""arguments of torchvision's Video Swins, whose own functions don't let them be changed"""
WINDOWS = {"patch_size": [2, 4, 4], "window_size": [8, 7, 7]}


@dataclass
class Model:
    """Which model sees the clips, and how it is trained."""

    name: str = "swin3d_t"
    """swin3d_t, swin3d_s or swin3d_b of torchvision; transformers/CLASS such as VideoMAEForVideoClassification; or an
    image model of timm, which sees one frame at a time"""
    options: dict[str, Any] = field(default_factory=dict)
    """further arguments of the model; for transformers, fields of its configuration"""
    drop_path: float = field(default=0.0, metadata=SHARE_BELOW_1)
    """rate of stochastic depth"""
    dropout: float = field(default=0.0, metadata=SHARE_BELOW_1)
    """dropout before the classifier and within time_layers"""
    lr: float = field(default=1.0, metadata=NOT_NEGATIVE)
    """learning rate of all but the classifier and time_layers, as a share of optimizer.lr"""
    weights: Path | None = None
    """begin from this file: a checkpoint of ours, a state dict of the same model or, for swin3d_*, one of torchvision's
    or timm's Swin of images, which is inflated"""
    new_head: bool = False
    """don't take the classifier from weights, for other classes; those of transformers may then be of pre-training"""
    chunk: int = field(default=64, metadata=COUNT)
    """timm: how many frames are run at a time where no gradients are needed, in evaluation too"""
    time_layers: int = field(default=0, metadata=NOT_NEGATIVE)
    """timm: number of transformer layers over features of frames, which see their order; 0 takes the features' mean"""


def is_video(name: str) -> bool:
    """Whether a model of that name has convolutions over time; the others see single frames."""
    return name in SWIN or name.startswith(TRANSFORMERS)


class Classifier(nn.Module):
    """Maps clips ``[B, 3, T, H, W]`` to logits ``[B, classes]``, those of several heads side by side."""

    def __init__(self, body: nn.Module, pool: nn.Module, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.body, self.pool, self.dropout = body, pool, nn.Dropout(dropout)
        self.head = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the whole model or, if the body sees single frames, the body alone."""
        (self.body.compile if isinstance(self.body, Frames) else super().compile)(*args, **kwargs)

    def forward(self, clips: Tensor) -> Tensor:
        return self.head(self.dropout(self.pool(self.body(clips))))


class Frames(nn.Module):
    """An image model on every frame: features ``[B, T, D]``."""

    def __init__(self, encoder: nn.Module, chunk: int) -> None:
        super().__init__()
        self.encoder, self.chunk = encoder, chunk
        self.sampling: SBPConfig | None = None
        """how whole frames are sampled"""
        self.step = 0

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the encoder alone: it is called on chunks of frames, by a mask that differs from step to step."""
        self.encoder.compile(*args, **{"dynamic": False, **kwargs})

    def forward(self, clips: Tensor) -> Tensor:
        video = clips.transpose(1, 2)
        if self.sampling is not None and self.training and torch.is_grad_enabled():
            return sampled_frames(self.encoder, video, self.sampling, self.step, self.chunk)
        encode = self.encoder if self.training else self.encoder.forward  # not compiled: any number of frames
        frames = video.flatten(0, 1)
        at_once = torch.is_grad_enabled() or torch.compiler.is_exporting()  # one graph for any number of clips
        found = encode(frames) if at_once else in_chunks(encode, frames, self.chunk)
        return found.unflatten(0, video.shape[:2])

    def sample(self, config: SBPConfig) -> None:
        check_frames_alone(config, "choose a sampler of positions, which samples tokens in every frame")
        self.sampling = config


class Transformer(nn.Module):
    """A video classifier of transformers without its last layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        model.classifier = nn.Identity()

    def forward(self, clips: Tensor) -> Tensor:
        return self.model(clips.transpose(1, 2)).logits


def make_model(config: Model, frames: int, size: int, classes: int, start: bool) -> Classifier:
    """Make a classifier for clips of that size; with ``start``, load the weights that training begins from."""
    try:
        body, head = make_body(config, frames, size)
    except UsageError:
        raise
    except Exception as error:  # an unknown name, an option it does not have, a value it can't use
        raise UsageError(f"task.model.name {config.name} with {config.options}: {error}") from error
    if config.time_layers and not isinstance(body, Frames):
        refuse("task.model.time_layers", config.time_layers, f"0 for {config.name}, which sees time by itself")
    features = width(body, frames, size, config.name)
    pool: nn.Module = Mean() if isinstance(body, Frames) else nn.Identity()
    if config.time_layers:
        pool, features = Time(features, frames, config.time_layers, config.dropout), Time.WIDTH
    model = Classifier(body, pool, features, classes, config.dropout)
    if config.weights is not None and start:
        load(model, config, head)
    return model


def make_body(config: Model, frames: int, size: int) -> tuple[nn.Module, str]:
    """Return the model without its classifier, and the classifier's name."""
    if config.name in SWIN:
        options = {**WINDOWS, **SWIN[config.name], "stochastic_depth_prob": config.drop_path, **config.options}
        swin = SwinTransformer3d(**options)
        swin.head = nn.Identity()
        return swin, "head"
    if config.name.startswith(TRANSFORMERS):
        return Transformer(of_transformers(config, frames, size)), "classifier"
    options = {"drop_path_rate": config.drop_path, **config.options}
    encoder = timm.create_model(config.name, num_classes=0, **options)
    return Frames(encoder, config.chunk), getattr(encoder, "default_cfg", {}).get("classifier", "head")


def of_transformers(config: Model, frames: int, size: int) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise UsageError("transformers is not installed; pip install 'torchsbp[transformers]'") from error
    name = config.name.removeprefix(TRANSFORMERS)
    known = [its for its in dir(transformers) if its.endswith("ForVideoClassification") and its[:4] != "Auto"]
    if name not in known:
        raise UsageError(
            f"task.model.name {config.name} is unknown; known: {', '.join(TRANSFORMERS + its for its in known)}"
        )
    if config.drop_path:
        raise UsageError(
            f"task.model.drop_path={config.drop_path}: transformers has its own, if any, in task.model.options"
        )
    clip = {"image_size": size, "num_frames": frames, "crop_size": size, "frames_per_clip": frames}
    kind: Any = getattr(transformers, name)
    fields = kind.config_class()
    unknown = [its for its in config.options if not (hasattr(fields, its) or hasattr(fields, f"_{its}"))]
    if unknown:  # transformers accepts any name
        raise UsageError(f"task.model.options: {type(fields).__name__} of transformers has no {', '.join(unknown)}")
    return kind._from_config(
        kind.config_class(**{**{its: value for its, value in clip.items() if hasattr(fields, its)}, **config.options})
    )


@torch.no_grad()
def width(body: nn.Module, frames: int, size: int, name: str) -> int:
    """Return the width of the features, found with a black clip."""
    try:
        with generators_kept():
            features = body.eval()(torch.zeros(1, 3, frames, size, size))
    except Exception as error:  # an assertion of the model, or whatever a layer raises
        raise UsageError(
            f"clips of task.data.frames={frames} and task.data.size={size} do not fit task.model.name {name}: {error}. "
            "Set them to the model's, or its own sizes in task.model.options"
        ) from error
    body.train()
    allowed = ["clips", "frames", "width"] if isinstance(body, Frames) else ["clips", "width"]
    if features.dim() != len(allowed):
        raise UsageError(
            f"task.model.name {name} gives features {tuple(features.shape)}; allowed: [{', '.join(allowed)}]"
        )
    return features.shape[-1]


def load(model: Classifier, config: Model, head: str) -> None:
    """Load weights, which must all be there and fit, except for those of a new classifier."""
    assert config.weights is not None
    found, own = read_weights(config.weights), model.state_dict()
    if not any(name.startswith("body.") for name in found):
        if isinstance(model.body, SwinTransformer3d):
            found = inflated(found, model.body)
        if isinstance(model.body, Transformer):
            found = named_now(model.body.model, found, config.new_head)
        inner = {Frames: "body.encoder.", Transformer: "body.model."}.get(type(model.body), "body.")
        found = {renamed(name, head, inner): value for name, value in found.items()}
        found |= {name: value for name, value in own.items() if name.startswith("pool.")}
    new = {name for name in own if name.startswith("head.")}
    if config.new_head:
        found = {name: value for name, value in found.items() if not name.startswith("head.")}
        found |= {name: own[name] for name in new}
    check_fit(own, found, new, str(config.weights))
    model.load_state_dict(found)


def renamed(name: str, head: str, inner: str) -> str:
    """Return the name in ``Classifier`` of a weight of a library's model."""
    return f"head.{name.removeprefix(f'{head}.')}" if name.startswith(f"{head}.") else inner + name


def groups(model: Classifier, lr: float, share: float) -> list[dict[str, Any]]:
    """Return groups of the body, at ``share`` of the rate, pool and head; vectors and position biases don't decay."""
    found: list[dict[str, Any]] = []
    for part, rate in ((model.body, lr * share), (model.pool, lr), (model.head, lr)):
        trained = [(name, its) for name, its in part.named_parameters() if its.requires_grad]
        for decays in (True, False):
            params = [its for name, its in trained if decaying(name, its) == decays]
            found += [{"params": params, "lr": rate, **({} if decays else {"weight_decay": 0.0})}] if params else []
    return found


def decaying(name: str, parameter: Tensor) -> bool:
    return parameter.dim() > 1 and not name.endswith("relative_position_bias_table")

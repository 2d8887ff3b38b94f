"""What a model sees of a clip: in training an augmented one, in evaluation several crops."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from ..data.clips import Target
from ..ranges import NOT_NEGATIVE, SHARE, SHARE_ABOVE_0, SHARE_BELOW_1, ranged, refuse


@dataclass
class Augment:
    """Augmentation, the same for all frames of a clip."""

    scale: tuple[float, float] = field(default=(0.08, 1.0), metadata=SHARE_ABOVE_0)
    """the least and the largest share of the frame that is cropped"""
    hflip: float = field(default=0.5, metadata=SHARE)
    """probability of a flip; set it to 0 where left and right are different classes"""
    rand_augment: int = field(default=0, metadata=ranged(0, 30))
    """magnitude of torchvision's RandAugment; 0: none"""
    color_jitter: float = field(default=0.0, metadata=NOT_NEGATIVE)
    """strength, of brightness, contrast and saturation"""
    smoothing: float = field(default=0.0, metadata=SHARE_BELOW_1)
    """label smoothing"""

    def __post_init__(self) -> None:
        if self.scale[0] > self.scale[1]:
            refuse("task.augment.scale", list(self.scale), "two numbers in (0, 1], the first not above the second")


class TrainView:
    """Maps 8-bit frames ``[T, height, width, 3]`` to ``[3, T, size, size]``."""

    def __init__(self, augment: Augment, size: int) -> None:
        jitter = augment.color_jitter
        steps: list[nn.Module] = [v2.RandomResizedCrop(size, augment.scale, antialias=True)]
        if augment.hflip:
            steps.append(v2.RandomHorizontalFlip(augment.hflip))
        if augment.rand_augment:
            steps.append(v2.RandAugment(magnitude=augment.rand_augment))
        if jitter:
            steps.append(v2.ColorJitter(jitter, jitter, jitter))
        self.transform = v2.Compose(steps)

    def __call__(self, frames: Tensor, target: Target) -> tuple[Tensor, Target]:
        seen = self.transform(frames.permute(0, 3, 1, 2))
        return seen.transpose(0, 1).contiguous(), target


class EvalViews:
    """Maps frames ``[clips · T, height, width, 3]`` to ``[clips · crops, 3, T, size, size]``.

    The shorter side is resized to ``side`` pixels. One crop is the centre; several are spread over the longer side.
    """

    def __init__(self, size: int, side: int, frames: int, crops: int) -> None:
        self.size, self.side, self.frames, self.crops = size, side, frames, crops

    def __call__(self, frames: Tensor, target: Target) -> tuple[Tensor, Target]:
        return self.of(frames), target

    def of(self, frames: Tensor) -> Tensor:
        images = v2.functional.resize(frames.permute(0, 3, 1, 2), [self.side], antialias=True)
        crops = torch.stack([self.crop(images, number) for number in range(self.crops)])
        views = crops.unflatten(1, (-1, self.frames))  # [crops, clips, T, 3, size, size]
        return views.flatten(0, 1).transpose(1, 2).contiguous()

    def crop(self, images: Tensor, number: int) -> Tensor:
        room = [side - self.size for side in images.shape[-2:]]
        share = 0.5 if self.crops == 1 else number / (self.crops - 1)
        longer = room.index(max(room))
        top, left = (round((share if side == longer else 0.5) * its) for side, its in enumerate(room))
        return images[..., top : top + self.size, left : left + self.size]

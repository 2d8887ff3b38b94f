"""Images and labels of a study, and the batches made from them."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from zipfile import BadZipFile

import torch
from torch import Generator, Tensor

from ..errors import DataError
from .augment import NUMBERS, Augment

KEYS = ("x_train", "y_train", "x_test", "y_test")


def read(path: Path, images: int = 0) -> list[Tensor]:
    """Read and check the arrays of a file: the first ``images`` of them (and a fifth as many to test), or all if 0."""
    import numpy as np

    try:
        with np.load(path) as arrays:
            missing = [key for key in KEYS if key not in arrays]
            if missing:
                raise DataError(f"{path} has no {', '.join(missing)}; a study needs the arrays {', '.join(KEYS)}")
            ends = [images or None] * 2 + [images // 5 or None] * 2
            found = [torch.from_numpy(arrays[key][:end]) for key, end in zip(KEYS, ends, strict=True)]
    except (ValueError, TypeError, OSError, BadZipFile) as error:
        raise DataError(f"{path} can not be read as an .npz file of arrays: {error}") from error
    for part, (x, y) in (("train", found[:2]), ("test", found[2:])):
        if x.dtype != torch.uint8 or x.dim() not in (4, 5) or x.shape[-1] != 3 or y.shape != x.shape[:1]:
            shapes = f"{list(x.shape)} ({str(x.dtype).removeprefix('torch.')}) and {list(y.shape)}"
            raise DataError(
                f"{path}: x_{part} and y_{part} are {shapes}; images must be uint8 [N, H, W, 3], clips "
                "uint8 [N, T, H, W, 3], and labels [N]"
            )
    return found


@dataclass(frozen=True)
class Data:
    """Images ``[N, 3, H, W]`` or clips ``[N, 3, T, H, W]`` (uint8) and labels, on the device."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int

    @classmethod
    @lru_cache(maxsize=1)
    def load(cls, path: Path, images: int = 0) -> "Data":
        """Read an .npz file with images ``[N, H, W, 3]`` or clips ``[N, T, H, W, 3]``, onto the GPU if there is one.
        The last result is cached."""
        tensors = read(path, images)
        ready = [t.movedim(-1, 1).contiguous() if t.dim() > 1 else t.long() for t in tensors]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        x_train, y_train, x_test, y_test = (t.to(device) for t in ready)
        return cls(x_train, y_train, x_test, y_test, classes=int(y_train.max()) + 1)

    @property
    def device(self) -> torch.device:
        return self.x_train.device

    def batch(self, chosen: Tensor, augment: Augment, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen images, augmented by the random numbers and shifted to [-0.5, 0.5]; targets ``[B, classes]``."""
        x, targets = augment(self.x_train[chosen].float() / 255, self.y_train[chosen], self.classes, numbers)
        return x - 0.5, targets

    def any_batch(self, size: int, augment: Augment, number: int = 0) -> tuple[Tensor, Tensor]:
        """A random batch that depends on ``number`` alone."""
        generator = Generator().manual_seed(number)
        chosen = torch.randperm(len(self.x_train), generator=generator)[:size]
        numbers = torch.rand(NUMBERS, len(chosen), generator=generator)
        return self.batch(chosen.to(self.device), augment, numbers.to(self.device))

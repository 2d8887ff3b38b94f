"""Validation data taken from the training data: the same share of every class, the same pictures every time."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from .images import Images


class Part:
    """Some of the pictures of a source."""

    def __init__(self, images: Images, indices: Sequence[int]) -> None:
        self.images, self.indices = images, indices
        self.names, self.classes = images.names, images.classes
        self.labels: Sequence[int] = [images.labels[index] for index in indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.images[self.indices[index]]

    def where(self, index: int) -> str:
        return self.images.where(self.indices[index])

    def key(self, index: int) -> str:
        return self.images.key(self.indices[index])


def split(images: Images, share: float, seed: int) -> tuple[Part, Part]:
    """Return the pictures to train with and those to validate with. Of n pictures of a class, round(share · n) are to
    validate with (of two or more at least one, never all): those whose names have the least hashes. So adding a picture
    moves at most one other."""
    by_class: dict[int, list[int]] = defaultdict(list)
    for index, label in enumerate(images.labels):
        by_class[label].append(index)
    held: set[int] = set()
    for indices in by_class.values():
        number = min(max(round(share * len(indices)), 1), len(indices) - 1)
        held.update(sorted(indices, key=lambda index: rank(images.key(index), seed))[:number])
    parts = ([i for i in range(len(images)) if (i in held) == valid] for valid in (False, True))
    train, valid = (Part(images, part) for part in parts)
    return train, valid


def rank(key: str, seed: int) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=8, salt=str(seed).encode()[:16]).digest()

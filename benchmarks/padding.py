"""How much of a detector's batches is padding, and what SBP keeps of them, with sizes drawn as in a recipe.

    python benchmarks/padding.py coco/mask_rcnn_convnext_tiny_sbp --task.data.root data/coco --task.model.masks false

After the recipe come options of ``torchsbp train``. A block keeps the share r of the padded positions of every image,
the image's own positions first. An image that fills the share s of the padded area keeps min(1, r/s) of its own, and
max(0, 1 − s/r) of what is kept for it is padding.
"""

import sys
from collections.abc import Sequence

import torch

from torchsbp.cli.recipe import parse
from torchsbp.train.detection.batches import padded_size, turned
from torchsbp.train.tasks import start

EPOCHS = 8
Size = tuple[int, int]


def drawn(argv: list[str]) -> tuple[list[list[Size]], list[Size], int]:
    """The sizes of images, batch by batch, and the recipe's buckets and multiple."""
    config = parse("train", argv)
    task = start(config.task, config.seed)
    order = task.train_order(config.per_forward(1), 0, 1, 1)
    order.epochs = EPOCHS
    shapes = [[task.train_data[place]["image"].shape for place in batch] for batch in order]
    return [[(h, w) for _, h, w in batch] for batch in shapes], config.task.data.buckets, config.task.data.multiple


def filled(batches: list[list[Size]], buckets: list[Size], multiple: int) -> torch.Tensor:
    """Every image's share of the padded area."""
    padded = [padded_size(batch, buckets, multiple) for batch in batches]
    pairs = zip(batches, padded, strict=True)
    return torch.tensor([h * w / (height * width) for batch, (height, width) in pairs for h, w in batch])


def line(batches: list[list[Size]], buckets: list[Size], multiple: int, ratio: float = 0.5) -> str:
    share = filled(batches, buckets, multiple)
    own, padding = (ratio / share).clamp(max=1).mean(), (1 - share / ratio).clamp(min=0).mean()
    sizes = f"{len(turned(buckets))} sizes" if buckets else f"multiples of {multiple}"
    return f"| {sizes} | {share.mean():.3f} | {(share < ratio).float().mean():.3f} | {own:.3f} | {padding:.3f} |"


def main(argv: Sequence[str]) -> None:
    batches, buckets, multiple = drawn(list(argv))
    print(f"{len(batches)} batches, r = 0.5\n")
    print("| padded to | image's share of the area | images below r | of an image's rows kept | of kept rows padding |")
    print("|---|---|---|---|---|")
    for its in (buckets, []):
        print(line(batches, its, multiple), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

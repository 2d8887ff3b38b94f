"""Batches: sizes that come again, padding, crops, images of one orientation together."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from torchsbp.errors import DataError
from torchsbp.train.detection import batches as B

BUCKETS = [(64, 96), (96, 128)]


@pytest.mark.parametrize(
    "sizes, buckets, padded",
    [
        ([(60, 90), (30, 33)], [], (64, 96)),
        ([(64, 96)], [], (64, 96)),
        ([(60, 90), (30, 33)], BUCKETS, (64, 96)),
        ([(90, 60), (30, 33)], BUCKETS, (96, 64)),
        ([(60, 97)], BUCKETS, (96, 128)),
        ([(97, 60)], BUCKETS, (128, 96)),
    ],
)
def test_batches_have_the_least_size_that_holds_their_images(sizes, buckets, padded):
    assert B.padded_size(sizes, buckets, 32) == padded


def test_what_fits_no_bucket_is_refused():
    with pytest.raises(DataError, match=r"images of 130 × 90 pixels fit none of task.data.buckets \[\(64, 96\)"):
        B.padded_size([(130, 90)], BUCKETS, 32)


def target(boxes, height: int, width: int) -> dict:
    masks = np.zeros((len(boxes), height, width), np.uint8)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes, strict=True):
        mask[y0:y1, x0:x1] = 1
    about = {"boxes": np.array(boxes, np.float32).reshape(-1, 4), "labels": np.arange(1, len(boxes) + 1)}
    return {**about, "masks": masks, "index": 7, "size": (height, width)}


def picture(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_boxes_and_masks_follow_the_picture():
    flip = B.Prepared(v2.RandomHorizontalFlip(1.0), v2.RandomShortestSize([80], 1000))
    sample = flip(picture(40, 60), target([(10, 5, 20, 15)], 40, 60))
    assert sample["image"].shape == (3, 80, 120)
    assert sample["boxes"].tolist() == [[80, 10, 100, 30]]
    assert sample["masks"][0, 10:30, 80:100].all()
    assert sample["masks"].sum() == 20 * 20
    assert type(sample["image"]) is type(sample["boxes"]) is torch.Tensor
    assert (sample["index"], sample["size"]) == (7, (40, 60))


def test_the_longer_side_has_a_limit():
    sample = B.Prepared(v2.RandomShortestSize([80], 100))(picture(40, 60), target([], 40, 60))
    assert sample["image"].shape == (3, 66, 100)
    assert sample["boxes"].shape == (0, 4)


def test_crops_are_between_their_sides_and_lose_objects_outside():
    crop = B.Prepared(B.CropBetween(30, 50), v2.SanitizeBoundingBoxes())
    lost = 0
    for seed in range(20):
        torch.manual_seed(seed)
        sample = crop(picture(40, 120), target([(0, 0, 8, 8), (60, 10, 80, 30)], 40, 120))
        _, height, width = sample["image"].shape
        assert 30 <= height <= 40
        assert 30 <= width <= 50
        assert len(sample["boxes"]) == len(sample["labels"]) == len(sample["masks"])
        assert (sample["boxes"][:, 2] <= width).all()
        lost += 2 - len(sample["boxes"])
    assert 10 < lost < 40


def test_images_lie_in_the_upper_left_corner():
    samples = [
        B.Prepared(v2.Identity())(picture(*size), target([(1, 2, 9, 9)], *size)) for size in ((40, 60), (33, 64))
    ]
    batch = B.collate(samples, [], 32)
    assert batch.images.shape == (2, 3, 64, 64)
    assert batch.sizes.tolist() == [[40, 60], [33, 64]]
    assert torch.equal(batch.images[0, :, :40, :60], samples[0]["image"])
    assert not batch.images[0, :, 40:].any()
    assert batch.targets[1]["masks"].shape == (1, 33, 64)
    assert batch.originals == [(40, 60), (33, 64)]


@pytest.mark.parametrize("world", [1, 2])
def test_batches_are_upright_or_on_their_sides(world):
    upright = torch.rand(103, generator=torch.Generator().manual_seed(0)) < 0.3
    orders = [B.GroupedOrder(103, 4, 0, rank, world) for rank in range(world)]
    for order in orders:
        order.upright, order.epochs = upright, 2
    batches = [[index for _, index in batch] for order in orders for batch in order]
    per_epoch = orders[0].batches_per_epoch
    mixed = sum(len({bool(upright[i]) for i in batch}) > 1 for batch in batches)
    assert mixed <= 2  # what is left over, in each epoch
    first = [i for order in range(world) for batch in batches[2 * per_epoch * order :][:per_epoch] for i in batch]
    assert len(first) == len(set(first)) == per_epoch * world * 4
    kinds = [bool(upright[batch[0]]) for batch in batches[:per_epoch]]
    assert kinds != sorted(kinds)  # they come in any order
    assert kinds != sorted(kinds, reverse=True)

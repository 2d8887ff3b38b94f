"""Masks in COCO's three formats: polygons, run lengths as numbers, run lengths as (compressed) text."""

from collections.abc import Iterator
from typing import Any

from ...errors import UsageError

FAR = 1e7
"""in pixels: no coordinate is that large"""


def tools() -> Any:
    """Return faster-coco-eval, which decodes masks and computes COCO's metrics."""
    try:
        import faster_coco_eval
    except ModuleNotFoundError as error:
        if error.name != "faster_coco_eval":
            raise
        raise UsageError("detection needs faster-coco-eval: pip install 'torchsbp[detection]'") from error
    return faster_coco_eval


def run_lengths(segmentation: Any, height: int, width: int) -> Any:
    """Convert polygons or run lengths to COCO's compressed run lengths."""
    mask = tools().mask
    if isinstance(segmentation, list):
        return mask.merge(mask.frPyObjects(segmentation, height, width))
    if isinstance(segmentation["counts"], list):
        return mask.frPyObjects(segmentation, height, width)
    return segmentation


def outside(segmentation: Any, height: int, width: int) -> bool:
    """Whether no part of a mask is in its image. Of polygons only the extent is checked: COCO has a million."""
    if isinstance(segmentation, list):
        return all(
            max(each[::2]) <= 0 or min(each[::2]) >= width or max(each[1::2]) <= 0 or min(each[1::2]) >= height
            for each in segmentation
        )
    return not tools().mask.area(run_lengths(segmentation, height, width))


def mask_problems(segmentation: Any, height: int, width: int) -> Iterator[str]:
    """Yield in words what is wrong with a mask."""
    if not segmentation:
        yield "it has no mask (segmentation); leave it out, or train boxes alone with task.model.masks=false"
    elif isinstance(segmentation, list):
        for polygon in segmentation:
            if not (isinstance(polygon, list) and len(polygon) >= 6 and len(polygon) % 2 == 0 and near(polygon)):
                yield f"a polygon of its mask is not x, y of three points or more: {shortened(polygon)}"
    elif not (isinstance(segmentation, dict) and {"size", "counts"} <= set(segmentation)):
        yield f"its mask is neither polygons nor run lengths (size, counts): {shortened(segmentation)}"
    elif segmentation["size"] != [height, width]:
        yield f"its mask is of {segmentation['size']} pixels, its image of {[height, width]}"
    else:
        yield from count_problems(segmentation, height * width)


def count_problems(segmentation: dict[str, Any], pixels: int) -> Iterator[str]:
    counts = segmentation["counts"]
    if isinstance(counts, list):
        if not all(type(its) is int and its >= 0 for its in counts) or sum(counts) != pixels:
            yield f"the run lengths of its mask do not fill its image, {pixels} pixels"
    elif not isinstance(counts, str):
        yield f"the run lengths of its mask are neither numbers nor text: {shortened(counts)}"
    else:
        try:
            tools().mask.decode(segmentation)
        except Exception as error:  # whatever the decoder raises
            yield f"its mask can't be decoded: {error}"


def near(numbers: list[Any]) -> bool:
    """Whether all are numbers that may be coordinates: not infinite, not NaN."""
    return all(type(its) in (int, float) and abs(its) < FAR for its in numbers)


def shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]} …"

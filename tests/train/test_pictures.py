"""Pictures of every kind become what the model wants, from every source, or are refused by name."""

import io
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from torchsbp.errors import DataError
from torchsbp.train.data.images import Arrays, open_images
from torchsbp.train.data.samples import Samples

GREYS = np.linspace(0, 65535, 256, dtype=np.uint16).reshape(16, 16)
COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (9, 90, 200)]


def encoded(image: Image.Image, kind: str = "png", **options) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def four(mode: str = "RGB") -> Image.Image:
    """2 × 2 pixels of different colours."""
    image = Image.new("RGB", (2, 2))
    image.putdata(COLOURS)
    return image.convert(mode)


def opened(folder: Path, data: bytes, source: str, mode: str = "RGB", kind: str = "png") -> Image.Image:
    """Through a folder or a shard, as training reads it."""
    if source == "folder":
        (folder / "train" / "a").mkdir(parents=True)
        (folder / "train" / "a" / f"x.{kind}").write_bytes(data)
        images = open_images("folder", folder, "train", True, None, mode)
    else:
        with tarfile.open(folder / "x.tar", "w") as tar:
            for name, content in ((f"x.{kind if kind in ('png', 'jpg', 'ppm') else 'png'}", data), ("x.cls", b"0")):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        images = open_images("shards", folder, "*.tar", True, 1, mode)
    return Samples(images, lambda image, label: image, seed=0)[0, 0]


def pixels(image: Image.Image) -> list:
    values = np.asarray(image)
    return (
        [tuple(map(int, its)) for its in values.reshape(-1, values.shape[2])] if values.ndim == 3 else values.tolist()
    )


@pytest.fixture(params=["folder", "shards"])
def source(request) -> str:
    return request.param


@pytest.mark.parametrize("kind", ["png", "ppm", "tiff"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_16_bits_are_rescaled(tmp_path, source, kind, mode):
    image = opened(tmp_path, encoded(Image.fromarray(GREYS), kind), source, mode, kind)
    found = np.asarray(image) if mode == "L" else np.asarray(image)[..., 1]
    assert np.array_equal(found.ravel(), np.arange(256))


def test_8_bits_are_left_as_they_are(tmp_path, source):
    assert pixels(opened(tmp_path, encoded(four()), source)) == COLOURS


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_what_is_transparent_is_seen_on_white(tmp_path, source, mode):
    """By alpha, a palette's transparent entry, or a key colour; what is hidden there does not count."""
    options, expected = {}, [0, 255]
    if mode == "P":
        image, options = Image.new("P", (2, 1)), {"transparency": 1}
        image.putpalette([0, 0, 0, 7, 7, 7])
        image.putdata([0, 1])
    elif mode == "RGB":
        image, options = Image.new("RGB", (2, 1)), {"transparency": (7, 7, 7)}
        image.putdata([(0, 0, 0), (7, 7, 7)])
    else:
        image = Image.new("RGBA", (3, 1))
        image.putdata([(0, 0, 0, 255), (0, 0, 0, 0), (0, 0, 0, 51)])
        image, expected = image.convert(mode), [0, 255, 204]
    found = opened(tmp_path, encoded(image, **options), source)
    assert pixels(found) == [(value,) * 3 for value in expected]


def test_a_palette_has_its_colours(tmp_path, source):
    assert pixels(opened(tmp_path, encoded(four().quantize(4)), source)) == COLOURS


def test_cmyk(tmp_path, source):
    image = Image.new("CMYK", (16, 8), (0, 0, 0, 0))
    image.paste((0, 255, 255, 0), (8, 0, 16, 8))  # red
    found = np.asarray(opened(tmp_path, encoded(image, "jpeg", quality=100), source, kind="jpg")).astype(int)
    assert np.abs(found[4, 2] - [255, 255, 255]).max() <= 3
    assert np.abs(found[4, 13] - [255, 0, 0]).max() <= 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_undone(tmp_path, source, orientation):
    """The camera stores the picture turned; ``apply`` says how, by numpy."""
    apply = {
        1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
        5: lambda a: a.T, 6: lambda a: np.rot90(a, 1), 7: lambda a: a[::-1, ::-1].T, 8: lambda a: np.rot90(a, -1),
    }[orientation]  # fmt: skip
    picture = np.arange(6, dtype=np.uint8).reshape(2, 3)
    stored = Image.fromarray(np.ascontiguousarray(apply(picture)))
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(np.asarray(opened(tmp_path, encoded(stored, exif=exif), source, "L")), picture)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_exif_does_not_matter(tmp_path, source):
    data = encoded(four().resize((8, 8)), "jpeg", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert opened(tmp_path, data, source, kind="jpg").size == (8, 8)


def test_of_an_animation_the_first_picture(tmp_path, source):
    frames = [Image.new("RGB", (2, 2), colour) for colour in COLOURS]
    data = encoded(frames[0], "png", save_all=True, append_images=frames[1:])
    assert pixels(opened(tmp_path, data, source)) == [COLOURS[0]] * 4


@pytest.mark.parametrize(
    "image, reason",
    [
        (Image.fromarray(np.zeros((2, 2), dtype=np.int32)), "its pixels are 32-bit integers, whose white is unknown"),
        (Image.fromarray(np.zeros((2, 2), dtype=np.float32)), "its pixels are floating point numbers, whose white is"),
    ],
)
def test_what_has_no_white_is_refused(tmp_path, source, image, reason):
    with pytest.raises(DataError) as refused:
        opened(tmp_path, encoded(image, "tiff"), source, kind="tiff")
    assert f"can't be read: {reason}" in str(refused.value)
    assert str(tmp_path) in str(refused.value)
    assert "x.t" in str(refused.value)


def test_a_bomb_is_refused(tmp_path, source):
    data = bytearray(encoded(Image.new("RGB", (2, 2))))
    data[16:24] = struct.pack(">II", 50_000, 50_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    with pytest.raises(DataError, match="it unpacks to more than 178,956,970 pixels; make it smaller, or leave it out"):
        opened(tmp_path, bytes(data), source)


def test_arrays_go_the_same_way():
    assert np.array_equal(np.asarray(Arrays("a", GREYS[None], [0], 1, "L")[0][0]).ravel(), np.arange(256))

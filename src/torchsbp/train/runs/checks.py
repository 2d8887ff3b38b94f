"""Check sums: written with a file, compared on every read.

A checkpoint ends in a trailer, ``MARK`` and the SHA-256 of everything before it; readers of torch.save's zip files skip
it. Safetensors allow nothing after their tensors, so their metadata have the SHA-256 of the file with zeros in place of
the sum. A second key says that there is a sum: otherwise damage to the name of the first would hide it.
"""

import hashlib
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from ...errors import CheckpointError

MARK = b"\ntorchsbp sha256 "
TRAILER = len(MARK) + hashlib.sha256().digest_size
PIECE = 1 << 22
SUM, SUMMED = "sha256", {"checked": "sha256"}
ZEROS = "0" * 64


class Summed:
    """A file to write to, and the SHA-256 of what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.flush = file, file.flush
        self.sum = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sum.update(data)
        return self.file.write(data)


def with_trailer(file: IO[bytes], write: Callable[[Any], Any]) -> None:
    """Let ``write`` write to the file, then add the trailer."""
    summed = Summed(file)
    write(summed)
    file.write(MARK + summed.sum.digest())


def check_trailer(path: Path) -> bool:
    """Whether the file has a trailer. Raise ``CheckpointError`` if its sum is not that of the file."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TRAILER))
        found = file.read()
        if not found.startswith(MARK):
            return False
        if sum_of(file, size - TRAILER) != found[len(MARK) :]:
            raise damaged(path)
    return True


def check_members(path: Path) -> None:
    """Check a file of torch.save that has no trailer by the sums that a zip file has for each part."""
    if not zipfile.is_zipfile(path):
        return  # torch's format before 1.6, or no file of torch at all: ``torch.load`` knows
    try:
        with zipfile.ZipFile(path) as parts:
            wrong = parts.testzip()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, UnicodeDecodeError, RuntimeError) as error:
        raise damaged(path) from error
    if wrong is not None:
        raise damaged(path, "; if it was saved with torch's set_crc32_options(False), save it again with True")


def summed_safetensors(data: bytes) -> bytes:
    """The file's bytes with the sum in the place of ``ZEROS``."""
    place = data.index(ZEROS.encode())
    return data[:place] + hashlib.sha256(data).hexdigest().encode() + data[place + len(ZEROS) :]


def check_safetensors(path: Path) -> None:
    """Raise ``CheckpointError`` if the file has a sum that is not its own. Files that others wrote have none."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if length > size - 8:
            return  # the reader of safetensors says what is wrong
        head = file.read(length)
        found = re.search(rb'"sha256":"([0-9a-f]{64})"', head)
        if found is None:
            if b'"checked":"sha256"' in head or b'"sha256":"' in head:
                raise damaged(path)
            return
        begin = start + head[: found.start(1)] + ZEROS.encode() + head[found.end(1) :]
        if sum_of(file, size, 8 + length, begin).hex() != found[1].decode():
            raise damaged(path)


def sum_of(file: IO[bytes], end: int, start: int = 0, before: bytes = b"") -> bytes:
    """The SHA-256 of ``before`` and the file's bytes from ``start`` to ``end``."""
    result = hashlib.sha256(before)
    file.seek(start)
    while start < end:
        piece = file.read(min(PIECE, end - start))
        if not piece:
            break
        result.update(piece)
        start += len(piece)
    return result.digest()


def damaged(path: Path, unless: str = "") -> CheckpointError:
    return CheckpointError(f"{path} is damaged: its content does not have the check sum it was written with{unless}")

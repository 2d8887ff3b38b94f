"""Checkpoint files, which are complete or not there: they are written under another name, synced and then renamed.
Reading one runs no code that it may contain."""

import errno
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from ...errors import CheckpointError, RunError
from . import checks

FORMAT = "torchsbp checkpoint 2"
"""the current format, with a check sum at its end"""
UNCHECKED = "torchsbp checkpoint 1"
"""the older format: the same without a check sum"""
STEP = "step-{:010d}.pt"
BEST = "best.pt"


def replace_file(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file so that at any moment the old or the new one is there, complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
        sync_folder(path.parent)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Inside, an ``OSError`` becomes a ``RunError`` with the file's name and what to do."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} can't be written: {error}. The checkpoints written so far are whole: make room, or the folder "
            "writable, then continue with --resume auto"
        ) from error


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(content: dict[str, Any], file: IO[bytes]) -> None:
    checks.with_trailer(file, lambda summed: torch.save({"format": FORMAT, **content}, summed))


def read(path: Path) -> dict[str, Any]:
    """The content of a file of torch.save. Raise ``CheckpointError`` if the file is damaged or has no dictionary."""
    try:
        checked = checks.check_trailer(path)
        if not checked:
            checks.check_members(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"no checkpoint at {path}") from error
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} {refusal(str(error))}") from error
    except Exception as error:  # unpickling damaged bytes may raise anything, and its messages help nobody
        reason = "it is truncated, or no checkpoint"
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a damaged offset may cause EINVAL
            reason = error.strerror or str(error)
        raise CheckpointError(f"{path} can't be read: {reason}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a checkpoint")
    if content.get("format") == FORMAT and not checked:
        raise checks.damaged(path)
    return content


def refusal(told: str) -> str:
    """Why torch refused a pickle, without its advice to load it all the same."""
    if found := re.search(r"GLOBAL ([\w.]+)", told):
        return (
            f"is refused: it holds {found[1]}, and to load anything but tensors and plain values is to run code of the "
            "file. Whoever trusts it can save its state_dict() alone, or as safetensors"
        )
    return "can't be read: it is truncated, or no checkpoint"


def read_run(path: Path) -> dict[str, Any]:
    """The content of a checkpoint that ``torchsbp train`` wrote."""
    content = read(path)
    if content.get("format") not in (FORMAT, UNCHECKED):
        raise CheckpointError(
            f"{path} was not written by torchsbp train (format {content.get('format')!r}, expected {FORMAT!r}); "
            "to begin from its weights set task.model.weights instead of resume"
        )
    return content


class Folder:
    """The checkpoints of a run: the last ones by step, and the best. Those that were put aside are ignored."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def steps(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.pt"))

    def save(self, content: dict[str, Any], step: int, best: bool) -> None:
        path = self.folder / STEP.format(step)
        try:
            replace_file(path, lambda file: write(content, file))
            if best:
                self.mark_best(step)
        except (OSError, RuntimeError) as error:
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            good = next((str(p) for p in reversed(self.steps()) if p != path), "none")
            raise CheckpointError(f"{path} can't be written: {cause}. The last good checkpoint: {good}") from error
        for old in self.steps()[: -self.keep]:
            old.unlink(missing_ok=True)

    def mark_best(self, step: int) -> None:
        """Give the checkpoint of this step a second name, ``BEST``."""
        temporary = self.folder / f".{BEST}.tmp"
        temporary.unlink(missing_ok=True)
        os.link(self.folder / STEP.format(step), temporary)
        os.replace(temporary, self.folder / BEST)
        sync_folder(self.folder)

    def clean(self) -> None:
        """Remove unfinished files that a killed process has left."""
        for left in (*self.folder.glob(".*.tmp"),):
            left.unlink(missing_ok=True)

    def newest(self, warn: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint that can be read, the best one if none of the last can; None if there is no file."""
        paths = [*reversed(self.steps()), *self.folder.glob(BEST)]
        for path in paths:
            try:
                return path, read_run(path)
            except CheckpointError as error:
                warn(f"{error}; trying the one before")
        if paths:
            raise CheckpointError(f"none of the {len(paths)} checkpoints in {self.folder} can be read")
        return None

    def put_aside(self, path: Path, step: int, say: Callable[[str], None]) -> None:
        """Rename checkpoints that lie beyond the one that a run continues from, damaged or left behind: otherwise they
        would count among the last ones, in the place of those still to come."""
        for other in self.steps():
            if other.name >= STEP.format(step) and other.resolve() != path.resolve():
                os.replace(other, other.with_name(f"aside-{other.name}"))
                say(f"{other} is now aside-{other.name}: the run goes on from {path.name}")

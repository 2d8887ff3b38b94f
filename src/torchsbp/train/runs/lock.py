"""One run per folder: a lock that the operating system releases when its process ends, however it ends."""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import ClassVar

from ...errors import RunError

FILE = ".lock"
HELD = (errno.EACCES, errno.EAGAIN)


class Lock:
    """Holds a folder until the context ends. The lock's file stays: if it were removed, two processes could each lock a
    file of that name.

    It is a POSIX record lock: forked workers don't inherit it, so none of them holds it longer than the run.
    """

    own: ClassVar[set[Path]] = set()
    """files that this process has locked: POSIX would let it lock them twice"""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = (folder / FILE).resolve()
        if self.path in self.own:
            raise RunError(refusal(folder, f"process {os.getpid()}, this one"))
        self.file = self.path.open("a+")
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.file.seek(0)
            holder = who(self.file.read())
            self.file.close()
            if error.errno in HELD:
                raise RunError(refusal(folder, holder)) from error
            warn(f"{folder} can't be locked ({error.strerror}): nothing keeps a second run out of it")
            return
        self.own.add(self.path)
        now = datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds")
        with suppress(OSError):  # it is held, even if a full disk keeps us from saying by whom
            self.file.truncate(0)
            self.file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}))
            self.file.flush()

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_: object) -> None:
        self.own.discard(self.path)
        with suppress(OSError):
            self.file.close()


def refusal(folder: Path, holder: str) -> str:
    return f"{folder} is in use by {holder}: wait for it, stop it, or choose another --out"


def who(text: str) -> str:
    try:
        found = json.loads(text)
        return f"process {found['pid']} on {found['host']}, since {found['since']}"
    except (ValueError, KeyError, TypeError):  # the holder is just writing this
        return "another process"

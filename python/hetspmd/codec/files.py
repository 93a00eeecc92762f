"""Files that are never half written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hetspmd.errors import OutputError


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to a file beside ``path``, then rename it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_output(text: str, path: str | os.PathLike[str]) -> None:
    """Write a file that a user has asked for, whole or not at all. Raises OutputError if it cannot be written."""
    try:
        write_atomically(Path(path), text)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}; name another file") from error

"""Files that the commands read and write."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetspmd.errors import ConstraintError, OutputError

STDOUT = "-"


def check_writable(path: str | None) -> None:
    """Raise OutputError if ``path`` cannot be written, before the work whose result goes there."""
    if path is None or path == STDOUT:
        return
    folder = Path(path).resolve().parent
    if Path(path).is_dir():
        raise OutputError(f"{path} is a folder; name a file in it")
    if not folder.is_dir():
        raise OutputError(f"{path} cannot be written: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK):
        raise OutputError(f"{path} cannot be written: no permission in {folder}; name another file")


def write_json(path: str, document: Mapping[str, Any]) -> None:
    """Write a document to a file, or to standard output for ``-``. Raises OutputError."""
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
        return
    from hetspmd.plan import write_atomically

    try:
        write_atomically(Path(path), text)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}; name another file") from error


def read_constraints(path: str | None) -> dict[str, str] | None:
    """A YAML or JSON file of globs to forms, such as ``{"*.weight": "shard(0)"}``. Raises ConstraintError."""
    if path is None:
        return None
    import yaml

    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConstraintError(
            f"cannot read the constraints {path}: {error.strerror}; name an existing file"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ConstraintError(
            f"{path}{line}: neither YAML nor JSON; write lines like encoder.*.weight: shard(0)"
        ) from error
    if not isinstance(document, dict) or not all(
        isinstance(k, str) and isinstance(v, str) for k, v in document.items()
    ):
        raise ConstraintError(
            f"{path}: constraints map names to forms; write lines like encoder.*.weight: shard(0)"
        )
    return document

"""Files that the commands read and write."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetspmd.cli.stdout import write_data
from hetspmd.errors import ConstraintError, OutputError

STDOUT = "-"


def check_writable(path: str | None, *, stdout: bool = False) -> None:
    """Raise OutputError if ``path`` cannot be written, before the work whose result goes there. ``stdout``: whether
    ``-`` stands for standard output."""
    if path is None or (stdout and path == STDOUT):
        return
    if path == STDOUT:
        raise OutputError(f"only --json and --out write to standard output ({STDOUT}); name a file")
    try:
        folder, is_folder = Path(path).resolve().parent, Path(path).is_dir()
    except (OSError, ValueError) as error:  # no name that a file can have
        raise OutputError(f"{path!r} cannot be written: {error}; name another file") from error
    if is_folder:
        raise OutputError(f"{path} is a folder; name a file in it")
    if not folder.is_dir():
        raise OutputError(f"{path} cannot be written: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK):
        raise OutputError(f"{path} cannot be written: no permission in {folder}; name another file")


def check_folder_writable(path: str | None) -> None:
    """Raise OutputError if files cannot be written to the folder ``path``, which is made if there is none, before
    the work whose results go there."""
    if path is None:
        return
    try:
        folder = Path(path).resolve()
        folder.exists()
    except (OSError, ValueError) as error:
        raise OutputError(f"{path!r} cannot be made: {error}; name another folder") from error
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{path} is a file; name a folder")
    if not folder.exists():
        if not folder.parent.is_dir():
            raise OutputError(
                f"{path} cannot be made: there is no folder {folder.parent}; make that one first"
            )
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{path} cannot be written: no permission in {folder}; name another folder")


def write_json(path: str, document: Mapping[str, Any]) -> None:
    """Write a document to a file, or to standard output for ``-``. Raises OutputError."""
    write_text(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def write_text(path: str, text: str) -> None:
    """Write text to a file, or to standard output for ``-``. Raises OutputError."""
    if path == STDOUT:
        write_data(text)
        return
    from hetspmd.codec.files import write_output

    write_output(text, path)


def read_constraints(path: str | None) -> dict[str, str] | None:
    """A YAML or JSON file of names or globs to forms, such as ``{"*.weight": "shard(0)"}``.

    Raises ConstraintError, naming the file, the line and the key, for what is not YAML, is no such mapping, is no
    form, or stands twice.
    """
    if path is None:
        return None
    import yaml

    from hetspmd.search.constraints import parse_wanted

    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConstraintError(
            f"cannot read the constraints {path}: {error.strerror}; name an existing file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConstraintError(f"{path}: not UTF-8 text: {error.reason}; {_WRITE}") from error
    except ValueError as error:
        raise ConstraintError(f"{path!r} is no path of a file of constraints: {error}") from error
    if text.lstrip().startswith("{"):
        text = text.replace("\t", " ")  # JSON allows tabs between tokens, YAML does not
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConstraintError(f"{path}{_yaml_problem(error)}") from error
    except RecursionError:
        raise ConstraintError(f"{path}: nested too deeply; {_WRITE}") from None
    except (ValueError, TypeError, IndexError) as error:  # the parser's own, of text that is no YAML
        raise ConstraintError(f"{path}: neither YAML nor JSON ({error}); {_WRITE}") from error

    def place(node: yaml.Node) -> str:
        return f"{path}:{node.start_mark.line + 1}"

    if not isinstance(root, yaml.MappingNode):
        raise ConstraintError(f"{path}: constraints map names to forms; {_WRITE}")
    constraints: dict[str, str] = {}
    first: dict[str, str] = {}
    for key, value in root.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ConstraintError(f"{place(key)}: a key is no name; {_WRITE}")
        if key.value in constraints:
            raise ConstraintError(
                f"{place(key)}: {key.value!r} stands twice (first at {first[key.value]}); remove one"
            )
        if not isinstance(value, yaml.ScalarNode):
            what = "list" if isinstance(value, yaml.SequenceNode) else "mapping"
            raise ConstraintError(f"{place(key)}: {key.value!r} is given a {what}; {_WRITE}")
        try:
            parse_wanted(value.value)
        except ValueError as error:
            raise ConstraintError(f"{place(key)}: {key.value!r}: {error}") from error
        constraints[key.value], first[key.value] = value.value, place(key)
    return constraints


_WRITE = "write lines like encoder.*.weight: shard(0)"


def _yaml_problem(error: Exception) -> str:
    """Line and cause of text that is not YAML. A glob that starts with ``*`` looks like a YAML alias."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = "" if mark is None else f":{mark.line + 1}"
    problem = getattr(error, "problem", None)
    cause = f" ({problem})" if problem else ""
    alias = "alias" in f"{getattr(error, 'context', None)} {problem}"
    mend = "put names that start with * in quotes: '*.weight': shard(0)" if alias else _WRITE
    return f"{line}: neither YAML nor JSON{cause}; {mend}"

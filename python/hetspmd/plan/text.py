"""The text of a plan file: JSON with the version of its format and the SHA-256 of its content.

``{"plan": ..., "sha256": "...", "version": 11}``. The checksum is of the canonical text of ``plan``, in which keys
are sorted and nothing stands between tokens, so that a file that was only formatted anew is still whole. It finds
every damage that leaves a possible plan: a changed number among an op's arguments or in a constant cannot be proved
wrong.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final, NoReturn, TypeVar

from hetspmd.codec.records import decode
from hetspmd.errors import HetspmdError, PlanError
from hetspmd.trace.collector import collector_paused

VERSION: Final = 11

_AGAIN: Final = "copy it again, or compile it again with hetspmd compile --plan FILE"
_KEYS: Final = ("plan", "sha256", "version")

T = TypeVar("T")


def content(tree: Any) -> str:
    """The canonical text of an encoded plan."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False)


def content_digest(text: str) -> str:
    """The checksum of a canonical text."""
    return hashlib.sha256(text.encode()).hexdigest()


def file_text(text: str) -> str:
    """The file of a canonical text."""
    return f'{{"plan":{text}{_end(content_digest(text))}'


def _end(digest: str) -> str:
    return f',"sha256":"{digest}","version":{VERSION}}}'


def read_content(text: str) -> tuple[Any, str]:
    """The encoded plan of a file's text, whole, and its checksum.

    Raises PlanError for text that is no JSON, that is of another version, or whose checksum is another.
    """
    document = _document(text)
    if not isinstance(document, dict) or "version" not in document or "plan" not in document:
        raise PlanError("not a plan file; write one with hetspmd compile --plan FILE")
    version = document["version"]
    if type(version) is not int or version != VERSION:
        raise PlanError(f"plan file of version {version!r:.20}, this release reads {VERSION}; compile again")
    if unknown := sorted(set(document) - set(_KEYS)):
        raise PlanError(f"the plan file is damaged: it has the unknown key {unknown[0]!r:.40}; {_AGAIN}")
    digest = document.get("sha256")
    if not isinstance(digest, str):
        raise PlanError(f"the plan file is damaged: it has no checksum sha256; {_AGAIN}")
    if digest != _digest_of(text, digest, document["plan"]):
        raise PlanError(
            "the plan file is damaged or was edited by hand: its content does not have the sha256 that it says; "
            f"{_AGAIN}"
        )
    return document["plan"], digest


def _digest_of(text: str, digest: str, tree: Any) -> str:
    start, end = '{"plan":', _end(digest)
    if text.startswith(start) and text.endswith(end):  # as it was written
        own = content_digest(text[len(start) : -len(end)])
        if own == digest:
            return own
    try:
        return content_digest(content(tree))
    except (ValueError, RecursionError):
        return ""


def _document(text: str) -> Any:
    try:
        with collector_paused():
            return json.loads(text, object_pairs_hook=_once, parse_constant=_no_json)
    except RecursionError:
        raise PlanError(f"the plan file is damaged: it is nested too deeply; {_AGAIN}") from None
    except ValueError as error:
        raise PlanError(
            f"not a plan file, or one that is damaged: {error}; write one with hetspmd compile --plan FILE"
        ) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise ValueError(f"the key {twice!r:.40} stands twice")
    return mapping


def _no_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def value_of(tree: Any, cls: type[T]) -> T:
    """The value of an encoded ``cls``. Raises PlanError, naming the place, for what it cannot be."""
    try:
        with collector_paused():
            return decode(tree, cls)
    except RecursionError:
        raise PlanError(f"the plan file is damaged: it is nested too deeply; {_AGAIN}") from None
    except (HetspmdError, ValueError, ArithmeticError) as error:
        raise PlanError(f"the plan file is damaged: {error}; {_AGAIN}") from error

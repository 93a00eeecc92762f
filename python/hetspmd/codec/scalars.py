"""Scalars of JSON text: what each may be, and the error that names what is not.

What is read here is exactly what :func:`hetspmd.codec.records.encode` writes: Python's reader of JSON takes more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import NoneType
from typing import Any, Final

Decoder = Callable[[Any], Any]
"""Makes of a JSON value what it stands for; raises DamageError for what it cannot be."""

_FLOATS: Final = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class DamageError(ValueError):
    """A JSON value is not of the kind that its place asks for; ``place`` leads to it from the root."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.place = ""

    def under(self, step: str) -> DamageError:
        """The same, seen from one level higher."""
        self.place = step + self.place
        return self

    def __str__(self) -> str:
        return f"{self.place.removeprefix('.') or 'the whole'} {self.problem}"


def _what(value: Any) -> str:
    if isinstance(value, dict):
        return f"a {value['$']}" if isinstance(value.get("$"), str) else "a mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def wrong(value: Any, wanted: str) -> DamageError:
    """The error that a value is not what is wanted, in words."""
    return DamageError(f"is {_what(value)}, not {wanted}")


def _none(value: Any) -> None:
    if value is not None:
        raise wrong(value, "null")


def _bool(value: Any) -> bool:
    if value is True or value is False:
        return value
    raise wrong(value, "true or false")


def _int(value: Any) -> int:
    if type(value) is not int:
        raise wrong(value, "a whole number")
    if not -(2**63) <= value < 2**64:
        raise DamageError("is a whole number of more than 64 bits")
    return value


def float_of(value: Any) -> float:
    """A number; those that JSON lacks are mappings. Raises DamageError for anything else."""
    if type(value) is float:
        if math.isfinite(value):
            return value
        raise wrong(value, "a number that JSON has")
    if isinstance(value, dict):
        name = value.get("$float")
        if len(value) == 1 and isinstance(name, str) and name in _FLOATS:
            return _FLOATS[name]
    return _int(value) if type(value) is int else fail(value, "a number")


def fail(value: Any, wanted: str) -> Any:
    """Raise the error that a value is not what is wanted."""
    raise wrong(value, wanted)


def _str(value: Any) -> str:
    if type(value) is not str:
        raise wrong(value, "a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise DamageError("is a string with half a character") from None
    return value


SCALARS: Final[dict[Any, Decoder]] = {
    NoneType: _none,
    bool: _bool,
    int: _int,
    float: float_of,
    str: _str,
}
"""The reader of each kind of scalar."""

"""Quantities of a cluster file: SI numbers, or numbers with a unit (``16GiB``, ``10.4Gbit/s``, ``50us``).

A quantity has a *kind*, which fixes its base unit: FLOP/s, bytes, bytes per second or seconds. ``B`` is a
byte and ``bit`` an eighth of one; k, M, G, T, P, E are powers of 1000, Ki, Mi, Gi, Ti, Pi powers of 1024.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Final, Literal

Kind = Literal["FLOP/s", "bytes", "bytes/s", "seconds"]

_DECIMAL: Final = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY: Final = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_SMALL: Final = {"": 1.0, "m": 1e-3, "u": 1e-6, "µ": 1e-6, "μ": 1e-6, "n": 1e-9}
_BYTES: Final = {"B": 1.0, "byte": 1.0, "bytes": 1.0, "bit": 0.125, "bits": 0.125}
_RATES: Final = {
    **{f"{unit}/s": size for unit, size in _BYTES.items()},
    "b/s": 0.125,
    "bps": 0.125,
    "bit/sec": 0.125,
    "Bps": 1.0,
}
_FLOPS: Final = {"FLOP/s": 1.0, "FLOPs/s": 1.0, "FLOPS": 1.0, "FLOPs": 1.0, "flop/s": 1.0, "flops": 1.0}

_UNITS: Final[dict[Kind, dict[str, float]]] = {
    "FLOP/s": {p + u: x * y for u, y in _FLOPS.items() for p, x in _DECIMAL.items()},
    "bytes": {p + u: x * y for u, y in _BYTES.items() for p, x in (_DECIMAL | _BINARY).items()},
    "bytes/s": {p + u: x * y for u, y in _RATES.items() for p, x in (_DECIMAL | _BINARY).items()},
    "seconds": {p + u: x for u in ("s", "sec") for p, x in _SMALL.items()},
}
EXAMPLES: Final[dict[Kind, str]] = {
    "FLOP/s": "12e12 or 12 TFLOP/s",
    "bytes": "17179869184 or 16GiB",
    "bytes/s": "1.3e9, 800GB/s or 10.4Gbit/s",
    "seconds": "5e-5 or 50us",
}
_SHOWN: Final[dict[Kind, str]] = {
    "FLOP/s": "FLOP/s with k, M, G, T, P or E before it",
    "bytes": "B, kB, MB, GB, TB, KiB, MiB, GiB or TiB",
    "bytes/s": "MB/s, GB/s, GiB/s, Mbit/s or Gbit/s",
    "seconds": "s, ms, us or ns",
}
_TOO_MUCH: Final = 10**308
_NUMBER = re.compile(r"([-+]?(?:\d[\d_]*\.?[\d_]*|\.\d+)(?:[eE][-+]?\d+)?)\s*(\S*)\Z")


def parse_quantity(value: object, kind: Kind) -> float:
    """The quantity in its base unit. Raises ValueError (what is wrong, and how to write it) unless it is a
    positive finite number, or a string of one with a unit of the kind."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{value!r} is no quantity; write {kind} as {EXAMPLES[kind]}")
    if isinstance(value, str):
        match = _NUMBER.match(value.strip())
        if match is None:
            raise ValueError(f"{value!r} is no quantity; write {kind} as {EXAMPLES[kind]}")
        unit = match[2]
        scale = _UNITS[kind].get(unit) if unit else 1.0
        if scale is None:
            raise ValueError(
                f"{value!r} has the unit {unit!r}; allowed are {_SHOWN[kind]}, or none for {kind}"
            )
        number = _exactly(match[1].replace("_", ""), scale)
    else:
        number = float(value) if abs(value) < _TOO_MUCH else math.inf
    if not math.isfinite(number) or number <= 0:
        raise ValueError(f"{value!r} is not positive and finite; write {kind} as {EXAMPLES[kind]}")
    return number


def _exactly(digits: str, scale: float) -> float:
    """Their product, exactly 5e-5 for 50us; infinite or nan for what no float is."""
    try:
        return float(Decimal(digits) * Decimal(repr(scale)))
    except ArithmeticError:
        return math.nan


def quantity_text(value: float, kind: Kind) -> str:
    """A quantity for people, to three digits: ``16 GiB``, ``1.3 GB/s``, ``50 us``, ``12 TFLOP/s``."""
    if not math.isfinite(value):
        return "unlimited"
    if kind == "bytes":
        prefixes, unit = _BINARY | {"": 1.0}, "B"
    elif kind == "seconds":
        prefixes, unit = {"": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}, "s"
    else:
        prefixes = {k: v for k, v in _DECIMAL.items() if k != "K"}
        unit = "B/s" if kind == "bytes/s" else "FLOP/s"
    fitting = [(scale, prefix) for prefix, scale in prefixes.items() if scale <= value * (1 + 1e-9)]
    scale, prefix = max(fitting) if fitting else min((s, p) for p, s in prefixes.items())
    return f"{value / scale:.4g} {prefix}{unit}"


def seconds_text(value: float) -> str:
    """Seconds for people, ``0 s`` where there are none."""
    return "0 s" if value == 0 else quantity_text(value, "seconds")

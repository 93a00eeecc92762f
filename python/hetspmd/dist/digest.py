"""Digests of tensors: 64 bits of a tensor's content that depend on every position, computed where the tensor lies.

The bytes are read as 64-bit words w_i, and

    digest = sum_i c_i (w_i + K (w_i >> 32))    mod 2^64

with fixed pseudo-random odd coefficients, products of a few hundred (:func:`_sum_of_products`) so that a process
keeps few KiB of them. The second summand carries a word's upper bits, signs and exponents, down
to where the multiplication spreads them, so that two contents which differ anywhere share a digest with a
probability of about 2^-31. It compares bits: 0.0 and -0.0 differ, equal NaN are equal.

Of a tensor beyond :data:`WHOLE` bytes, 512 evenly spread runs of 1 KiB are read, others in every step, so that the
digest costs no more than a tenth of a millisecond and rows that were permuted or replaced are met all the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

import torch
from torch import constant_pad_nd

WHOLE: Final = 1 << 20
"""Bytes up to which all of a tensor is read."""

_WORD: Final = 8
_RUN: Final = 128
_RUNS: Final = 512
_LINE: Final = 1 << 15
"""Words that are read at once: what is computed on the way takes a few times their 256 KiB."""
_ROW: Final = 1 << 9
"""Coefficients that are kept; every so many words they are the same again, times one of those behind them."""
_FOLD: Final = 0x2545_F491_4F6C_DD1D
_STEP: Final = 0x5851_F42D_4C95_7F2D
_MASK: Final = (1 << 64) - 1


def digest(tensor: torch.Tensor, step: int = 0, *, whole: bool = False) -> torch.Tensor:
    """The digest, an int64 scalar on the tensor's device. ``step`` chooses the part of a large tensor that is read;
    with ``whole`` all of it is."""
    with torch.no_grad():
        words, rest = _words(tensor)
        count = words.numel()
        if count > WHOLE // _WORD and not whole:
            spacing = count // _RUNS
            start = min((step * _RUN) % spacing, spacing - _RUN)
            runs = words[: _RUNS * spacing].view(_RUNS, spacing)[:, start : start + _RUN]
            total = _sum(runs.reshape(-1)) + _line(words[-_RUN:]) * _STEP_SIGNED
        else:
            total = _sum(words)
        return total if rest is None else total * _STEP_SIGNED + _line(rest)


def join(values: Iterable[int]) -> int:
    """One digest of several, in order, as a signed 64-bit integer."""
    total = 0
    for value in values:
        total = (total * _STEP + value * _FOLD + 1) & _MASK
        total ^= total >> 29
    return signed(total)


def signed(value: int) -> int:
    """The signed 64-bit integer of the same bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_STEP_SIGNED: Final = signed(_STEP)


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The content in order as words, and what is left of it as one more."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    flat = tensor.reshape(-1)
    size = flat.numel() * flat.element_size()
    if size % _WORD == 0 and flat.storage_offset() * flat.element_size() % _WORD == 0:
        return (flat.view(torch.int64) if size else flat.new_empty(0, dtype=torch.int64)), None
    raw = flat.view(torch.uint8)
    if raw.storage_offset() % _WORD and size > WHOLE:
        raw = raw.clone()
    even = size - size % _WORD if size > WHOLE else 0
    rest = constant_pad_nd(raw[even:], (0, -size % _WORD)).view(torch.int64)
    return (raw[:even].view(torch.int64), rest if rest.numel() else None) if even else (rest, None)


def _sum(words: torch.Tensor) -> torch.Tensor:
    """The digest of all words, a line after the other."""
    total = _line(words[:_LINE])
    for start in range(_LINE, words.numel(), _LINE):
        total = total * _STEP_SIGNED + _line(words[start : start + _LINE])
    return total


def _line(words: torch.Tensor) -> torch.Tensor:
    mixed = torch.add(words, words >> 32, alpha=_FOLD)
    return _sum_of_products(mixed, _coefficients(words.device))


def _sum_of_products(values: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """The sum of up to a line of values, each times one of ``by[:_ROW]`` and, from the first whole row on, one of
    those behind them for each row: ``sum_i v_i by[i mod R] by[R + i div R]``."""
    rows, count = values.numel() // _ROW, values.numel()
    if not rows:
        return _dot(values, by[:count])
    across, down, whole = by[:_ROW], by[_ROW:], rows * _ROW
    folded = values[:whole].view(rows, _ROW)
    sums = torch.mv(folded, across) if values.device.type == "cpu" else (folded * across).sum(1)
    total = _dot(sums, down[:rows])
    return total if whole == count else total + _dot(values[whole:], across[: count - whole]) * down[rows]


def _dot(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The inner product; devices other than CPUs have none of integers."""
    return torch.dot(one, other) if one.device.type == "cpu" else (one * other).sum()


@lru_cache(maxsize=16)
def _coefficients(device: torch.device) -> torch.Tensor:
    """Odd pseudo-random words (splitmix64), the same on every device and in every version of torch: those of a row,
    and one for each row of a line."""
    state = torch.arange(1, _ROW + _LINE // _ROW + 1, dtype=torch.int64) * signed(0x9E37_79B9_7F4A_7C15)
    for shift, factor in ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB)):
        state = (state ^ _shifted(state, shift)) * signed(factor)
    return ((state ^ _shifted(state, 31)) | 1).to(device)


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifted to the right, zeros from the left."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def projection(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the elements times random signs, and the sum of their squares, as float64 scalars.

    Of two tensors the sums differ by about the norm of their difference.
    """
    with torch.no_grad():
        flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
        total = torch.zeros((), dtype=torch.float64, device=flat.device)
        square = total.clone()
        for start in range(0, flat.numel(), _LINE):
            line = flat[start : start + _LINE].double()
            total += _sum_of_products(line, _signs(flat.device))
            square += torch.dot(line, line)
        return total, square


@lru_cache(maxsize=16)
def _signs(device: torch.device) -> torch.Tensor:
    return 1.0 - 2.0 * ((_coefficients(device) >> 40) & 1).double()

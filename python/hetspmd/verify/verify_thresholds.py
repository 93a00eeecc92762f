"""The numbers by which two computations count as equal, each with its unit and its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch


@dataclass(frozen=True, kw_only=True)
class KindNoise:
    """Below which part of the largest magnitude among the tensors of a kind one of them is nothing but rounding, by
    the kind (:func:`hetspmd.verify.difference.largest_error`). The loss is one tensor, and so never noise."""

    loss: float = 0.0
    gradients: float
    parameters: float


@dataclass(frozen=True, kw_only=True)
class VerifyThresholds:
    """Errors are relative to the largest magnitude of a tensor; those in float64 and in float32 are apart."""

    tolerance_float64: float = 1e-9
    """The largest error that counts as equal in float64: ranks add in another order, and a few roundings follow."""

    tolerance_float32: float = 1e-3
    """The same in float32: some eight thousand of its roundings, which add up in deep models."""

    noise_float64: KindNoise = KindNoise(gradients=1e-12, parameters=1e-10)
    """Of a gradient that cancels, some thousand roundings remain; an optimizer enlarges them in a parameter."""

    noise_float32: KindNoise = KindNoise(gradients=1e-5, parameters=1e-5)
    """The same in float32."""

    rounded_starts: int = 3
    """Runs of one device with parameters that are one rounding away: the largest change of a few is taken, as one
    may happen to change little."""

    allowed_changes: float = 4.0
    """Times what such a start changes that the ranks may differ by: they round in more places than the start."""

    allowed_tolerances: float = 100.0
    """Times the tolerance that they may differ by at most, however much a rounding changes: with more, nothing is
    proved."""

    located_changes: float = 100.0
    """Times what such a start changes in a value from which on the value differs: one start shows little of how
    far a single value may go."""

    same_number: float = 1e-12
    """The part by which multiples of limits of two dtypes differ if they are the same: the rest is rounding."""

    def tolerance(self, dtype: torch.dtype) -> float:
        """The largest error that counts as equal in a dtype."""
        return self.tolerance_float64 if dtype == torch.float64 else self.tolerance_float32

    def noise(self, dtype: torch.dtype) -> KindNoise:
        """What is rounding in a dtype."""
        return self.noise_float64 if dtype == torch.float64 else self.noise_float32


THRESHOLDS: Final = VerifyThresholds()
"""Those that are used."""

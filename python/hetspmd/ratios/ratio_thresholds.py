"""The numbers by which ratios are sought and compared, each with its unit and its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class RatioThresholds:
    """How many candidates are tried, how exactly linear programs are solved, and which differences are rounding."""

    device_subsets: int = 6
    """Subsets of devices that are tried beside all of them: each takes a search of its own."""

    device_sets: int = 32
    """Sets of devices, up to which a linear program is solved for every one: each takes a linear program."""

    sets_without_gain: int = 2
    """Sets in a row, each without one more device, that need not help: one may help only with the next."""

    solutions: int = 100
    """Solutions of a linear program, each after further cuts, at most: an end where rounding lets
    cuts follow each other for ever."""

    kinds_times_segments: int = 64
    """Kinds of devices times segments, up to which neighbouring segments are tied one pair after another: each pair
    takes a linear program of so many shares."""

    better_part: float = 1e-9
    """The part of the step's seconds by which a candidate must be better than the best so far: less is rounding."""

    bound_part: float = 1e-9
    """The part by which ratios and bytes may be beyond their bounds: less is rounding."""

    equal_shares: float = 1e-9
    """Difference of two shares, as parts of an axis, up to which they count as equal: less is rounding."""

    smallest_share: float = 1e-12
    """The share, as a part of an axis, up to which a device has none: the solver's rounding noise."""

    interior_rows: int = 4000
    """Rows of a linear program, above which its first solution is an interior point's: from nothing that method is
    the quicker one for large programs."""

    tolerances: tuple[float, ...] = (1e-10, 1e-9, 1e-8, 1e-7)
    """How far rows and reduced costs may be off, in units of the program; HiGHS takes nothing smaller than the
    first. Where it finds no solution, the next is taken."""

    simplex_steps: int = 20
    """Steps of the simplex method per row and column, after which the next of the tolerances is taken.

    Programs are solved within 9; at the first tolerance, which is as small as rounding, some went round in circles
    for millions of steps."""

    cut_part: float = 1e-8
    """The part of a stage's seconds by which they must be beyond the solution's to add a supporting line: less is
    within the solver's tolerances."""

    cut_scaled: float = 1e-10
    """The same of stages that take hardly any time, in units of the seconds of the stage at the start."""

    better_quantity: float = 0.1
    """The part by which a quantity is better for its ``gain``: what a user may get by another device or link."""

    gains: int = 8
    """Quantities that are given a gain, where their number is not given: each takes a linear program."""

    smallest_elasticity: float = 1e-9
    """The elasticity up to which a quantity is none on which the step depends: less is rounding."""


THRESHOLDS: Final = RatioThresholds()
"""Those that are used."""

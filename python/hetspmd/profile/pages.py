"""Page faults of what is timed on a CPU, and the samples that are free of passing ones.

A call whose large results lie elsewhere than the last call's waits for the system to provide their pages, up to ten
times as long as it computes. In training, memory settles within the first steps: then it has none of them, or the
same in each step (where what is freed goes back to the system). So the samples of a call with the fewest count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hetspmd.profile.profile_thresholds import THRESHOLDS

try:
    from resource import RUSAGE_SELF, getrusage
except ImportError:  # not on Windows

    def page_faults() -> int:
        """0: nobody counts them here."""
        return 0
else:

    def page_faults() -> int:
        """Page faults of this process so far."""
        return getrusage(RUSAGE_SELF).ru_minflt


class Sample(NamedTuple):
    """Seconds of a call, and its page faults; means where a sample is several calls."""

    seconds: float
    faults: float = 0.0


def settled(samples: Iterable[Sample], fewest: float | None = None) -> list[float]:
    """Seconds of the samples whose page faults are near the ``fewest``, by default of these."""
    all_samples = list(samples)
    least = min((s.faults for s in all_samples), default=0.0) if fewest is None else fewest
    most = THRESHOLDS.more_page_faults * least + THRESHOLDS.page_faults
    return [s.seconds for s in all_samples if s.faults <= most]


def settling(samples: list[Sample]) -> bool:
    """Whether the last sample had page faults that the next may not have."""
    last, more = samples[-1].faults, THRESHOLDS.more_page_faults
    return last > THRESHOLDS.page_faults and (len(samples) == 1 or more * last < samples[-2].faults)

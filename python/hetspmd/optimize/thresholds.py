"""The numbers by which the compiler decides what is worth trying, each with its unit and its reason.

They were chosen on the models and clusters of docs/reproduction.md: a smaller gain than these is within the error
of the cost model, and more attempts than these found nothing better there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Parts are of the predicted seconds of a step, unless another whole is named."""

    rounds: int = 4
    """Rounds of search and ratios from one start. Candidates repeat after two or three in practice."""

    memory_search_gain: float = 0.005
    """The part that another search at prices of memory should gain: such a search takes several plain ones."""

    memory_attempts: int = 4
    """Attempts at ratios whose whole units keep within the memory."""

    nearly_fits: float = 0.05
    """The part of a device's memory that the nearest program may lack, for the best one without regard to memory to
    be looked at."""

    far_from_fitting: float = 0.5
    """The part of a device's memory that the nearest program lacks, from which on a quick synthesis tries no other
    ratios, and that a program lacks with one sample in each micro-batch, where it is tried in no number of them."""

    out_of_reach: float = 3.0
    """Times the best seconds that a level of ZeRO takes at least with parameters stored in one way, from which on
    it is not tried in others: these differ in latencies and in padding."""

    near_draft: float = 0.05
    """Drafts of plans in several numbers of micro-batches that are slower than the best by at most this part are
    made plans: storage, hidden communication and fewer devices may gain as much."""

    bounded_again: float = 0.97
    """Times the bound of a device whose whole units were more than fits, for the next attempt: all of them together
    take a tenth off, which is more than a unit of most axes."""

    equal_starts: float = 1e-3
    """Difference of shares, as parts of an axis, up to which ratios are no other start: less than a unit of
    most axes."""

    baseline_expansions: int = 10_000
    """Expansions of a search for a known kind of program at most, a tenth of what others have: it is there for
    comparison."""

    overlap_weights: tuple[float, ...] = (0.5, 0.1)
    """Weights on communication that other work can hide, for further candidates."""

    near_best: float = 0.1
    """A start whose best candidate takes at most this part longer than the best of all gets further candidates."""

    near_stored: float = 0.02
    """Devices whose best candidate takes at most this part longer than the best of all, or twice the part that
    storage of parameters has gained that one, are worth tries of storage too."""

    prefetch_distances: tuple[int, ...] = (2, 3, 4, 6, 8, 12, 16)
    """How many gathers ahead parameters are fetched, beside one."""

    distances_without_gain: int = 3
    """Prefetch distances in a row that need not gain anything."""

    sharded_parts: tuple[float, ...] = (1.0, 0.85, 0.7, 0.5)
    """Parts of the parameters' bytes that are stored in shards."""

    smallest_parameters: float = 0.01
    """The smallest parameters, with this part of all parameters' bytes, are not stored in shards of their own."""

    hidden_gain: float = 0.03
    """The part that must be left to gain: between the step and what the devices compute or the links carry, and in
    which the links are idle while the forward runs."""

    even_shard: float = 1 / 32
    """A largest shard that is larger than the mean by at most this part of it counts as even."""

    near_best_prefetch: float = 0.25
    """Candidates that may gain by prefetched parameters or hidden communication are slower than the best by at most
    this part."""

    prefetch_candidates: int = 4
    """Candidates of which prefetch distances are tried."""

    parameter_groups: int = 32
    """Groups of parameters whose storage is changed together."""

    smallest_in_groups: float = 0.002
    """The smallest parameters, with this part of all parameters' bytes, belong to no group."""

    small_in_loop: float = 0.01
    """The smallest parameters and gradients, with this part of all their bytes, are communicated outside of a loop
    over micro-batches."""

    memory_gain: float = 1e-3
    """The part by which a candidate that does not fit must be faster than the best for memory to be short."""

    many_instructions: int = 4000
    """Instructions of a step from which a compilation takes too long for recomputation to be settled by several,
    and plans in several numbers of micro-batches are drafted before one of them is made."""

    storage_rounds: int = 2
    """Rounds through all groups of parameters."""

    changes_without_gain: int = 20
    """Groups of parameters in a row whose storage is changed without a gain, in one way or in the other, until a
    round ends: those of most bytes come first. ResNet-50 on 64 devices gains 1 % after 17."""

    changes_that_do_not_fit: int = 3
    """The same that do not fit the memory, until no more are stored in that way: the next ones hold as much."""

    storage_round_gain: float = 0.01
    """The part that the first round through the groups must gain to be followed by another."""

    segments: int = 8
    """Segments of a graph at most, where their number is not given."""

    segments_gain: float = 0.01
    """The part of the stage model's step that segments must be able to gain if cuts between them cost nothing."""

    more_segments_gain: float = 1e-3
    """The part that more segments must gain."""

    uneven_halves: float = 0.25
    """The part by which a half of a graph may weigh more or less seconds than it should, to cut fewer bytes."""

    inside_gain: float = 0.01
    """The part that a candidate across machines must be able to gain by what goes on inside them: if that were
    nothing, it would be faster by so much."""

    inside_candidates: int = 6
    """Candidates for which what goes on inside machines is searched, beside the best one."""

    machine_memory_attempts: int = 4
    """Plans of machines, each with less memory, until the memory of the accelerators inside suffices."""

    machine_memory_part: float = 0.99
    """The part that the next of them has of the memory with which, in proportion, it would just suffice: whole
    units do not keep to proportions."""


THRESHOLDS: Final = Thresholds()
"""Those that are used."""

QUICK: Final = Thresholds(prefetch_candidates=2)
"""Those of a synthesis that is one of several, of which the best is taken (``micro_batches="auto"``)."""

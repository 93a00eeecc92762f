"""Measuring the collectives between a group of ranks.

A sample: the ranks meet in a one-element all-reduce, then each runs the collective as a lowered program does
(start, wait) and takes its time; the sample is the largest of these. Every collective runs a few times before the
first sample, as a new group makes its connections and threads with its first ones. Sizes grow by eight, six samples
of each case, as long as the next size is expected to fit into half of what is left of the budget. The first
``first_levels`` sizes are measured whatever the budget, and so are further ones until every collective takes
``hidden_growth`` times as long as at the least size, for before that its bandwidth is hidden by its latency. What
time is left repeats the cases whose medians are not tight, those with the fewest samples and the widest intervals
first. Every rank sees all samples and the latest of all clocks, so that all decide alike.

A program has collectives in a row, and some backends carry these more slowly: gloo's broadcasts from two ranks
share a link in both directions when they begin on an idle one, but not those that follow (it seems that their
receivers' word that they are ready waits behind what these send themselves). So each case also runs
``row_collectives`` times in a row at the largest size, and where such a one takes k > 1 times a single one's
seconds, the points that bandwidth decides are k times what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from time import perf_counter, thread_time

import torch

from hetspmd.cluster.collective_kinds import Kind
from hetspmd.cluster.curves import Point
from hetspmd.dist import collectives
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.random import Randomness
from hetspmd.dist.runtime import Runtime
from hetspmd.profile.collective_trials import Trial, start, trials
from hetspmd.profile.device import synchronize
from hetspmd.profile.profile_thresholds import THRESHOLDS
from hetspmd.profile.session import Session
from hetspmd.profile.timing import interval, tight

Tick = Callable[[str], None]


@dataclass
class _Case:
    trial: Trial
    samples: list[float] = field(default_factory=list)
    in_a_row: float = 1.0
    """Times a single one's seconds that each of several in a row takes."""

    @property
    def seconds(self) -> float:
        """The median of the samples."""
        return float(median(self.samples))

    @property
    def width(self) -> float:
        """Half the interval of the median, as a part of it."""
        middle, low, high = interval(self.samples)
        return (high - low) / 2 / middle

    def point(self) -> Point:
        """The measured point, as of one in a row."""
        t = self.trial
        middle, low, high = (self.in_a_row * seconds for seconds in interval(self.samples))
        return Point(t.skew, t.nbytes, t.shards, t.largest, t.exchange, middle, low, high, len(self.samples))


def measure_group(
    session: Session,
    ranks: Sequence[int],
    order: Sequence[int],
    deadline: float,
    tolerance: float,
    tick: Tick,
) -> list[tuple[Kind, Point]]:
    """The points of all collectives between ``ranks``; all ranks of the session call this, and get the same.

    order     positions in ``ranks``, the fastest device first
    deadline  in seconds since the ranks met

    Raises ProfileError on every rank if a rank fails.
    """
    first_samples, most_samples = THRESHOLDS.first_samples, THRESHOLDS.most_samples
    everyone = range(session.world)
    rest = [r for r in everyone if r not in ranks]
    what = f"the collectives between {len(ranks)} devices"
    with session.guard(what):
        own = session.communicator.split([sorted(ranks), rest] if rest else [sorted(ranks)])
    bench = _Bench(session, own if session.rank in ranks else None, deadline, tick)
    cases: list[_Case] = []
    levels: list[list[_Case]] = []
    for index, nbytes in enumerate(THRESHOLDS.level_bytes):
        if index >= THRESHOLDS.first_levels:
            most = (deadline - bench.clock) / 2 if _grown(levels) else THRESHOLDS.hidden_level_seconds
            if _ahead(levels) > most:
                break
        level = [_Case(t) for t in trials(nbytes, order)]
        levels.append(level)
        session.together("allocating", partial(bench.allocate, nbytes))
        with session.guard(what):
            if index == 0:
                bench.warm(level)
            bench.visit(level, [first_samples] * len(level), warm=True)
        cases += level
    with session.guard(what):
        _in_rows(bench, levels)
    while True:
        wide = [c for c in cases if len(c.samples) < most_samples and not tight(c.samples, tolerance)]
        chosen: list[_Case] = []
        counts: list[int] = []
        budget = deadline - bench.clock
        for case in sorted(wide, key=lambda c: (len(c.samples), -c.width)):
            taken = len(case.samples)
            count = min(taken, 2 * first_samples, most_samples - taken)
            budget -= THRESHOLDS.meeting_part * count * case.seconds
            if budget < 0:
                break
            chosen.append(case)
            counts.append(count)
        if not chosen:
            break
        with session.guard(what):
            bench.visit(chosen, counts, warm=False)
    return [(c.trial.kind, c.point()) for c in cases]


def _in_rows(bench: _Bench, levels: Sequence[Sequence[_Case]]) -> None:
    """Tell what takes longer in a row; of sizes that take ``hidden_growth`` times as long as the least."""
    *_, last = (level for level in levels if level[0].trial.nbytes <= THRESHOLDS.row_bytes)
    singles = [min(case.samples) for case in last]
    for index, (single, seconds) in enumerate(zip(singles, bench.rows(last), strict=True)):
        of_sizes = [level[index] for level in levels]
        for case in of_sizes:
            if case.seconds >= THRESHOLDS.hidden_growth * of_sizes[0].seconds:
                case.in_a_row = max(seconds / single, 1.0)


def _ahead(levels: Sequence[Sequence[_Case]]) -> float:
    """Seconds that the next level will take, if each case goes on along the line through its last two sizes."""
    sizes = THRESHOLDS.level_bytes
    step = sizes[len(levels)] / sizes[len(levels) - 1]
    before, last = ([case.seconds for case in level] for level in levels[-2:])
    ahead = [b + step * max(b - a, 0.0) for a, b in zip(before, last, strict=True)]
    return THRESHOLDS.meeting_part * (THRESHOLDS.first_samples + 1) * math.fsum(ahead)


def _grown(levels: Sequence[Sequence[_Case]]) -> bool:
    """Whether even shards take ``hidden_growth`` times as long as at the least size, in every collective."""
    pairs = zip(levels[0], levels[-1], strict=True)
    return all(b.seconds >= THRESHOLDS.hidden_growth * a.seconds for a, b in pairs if a.trial.skew == "even")


def measure_lanes(session: Session) -> int:
    """How many collectives the backend has on their way at a time: the largest k of ``lane_counts`` for which k
    short all-reduces that are started together take less than one and a half times as long as one alone, in the
    mean (the slowest rank's time of each). Every rank gets the same number.

    Raises ProfileError on every rank if a rank fails.
    """
    counts, rounds = THRESHOLDS.lane_counts, THRESHOLDS.lane_rounds
    with session.guard("collectives that are started together"):
        runtime = Runtime(session.communicator, Randomness(0, session.rank, session.device))
        operand, one = (torch.ones(n, device=session.device) for n in (THRESHOLDS.level_bytes[0] // 4, 1))

        def sample(count: int) -> float:
            session.communicator.all_reduce(one).wait()
            synchronize(session.device)
            begin = perf_counter()
            for pending in [collectives.start_all_reduce(runtime, operand) for _ in range(count)]:
                pending.wait()
            synchronize(session.device)
            return perf_counter() - begin

        sample(counts[-1])
        taken = [[sample(count) for count in counts] for _ in range(rounds)]
        every = session.communicator.exchange(taken)
    means = [fmean(max(rank[i][k] for rank in every) for i in range(rounds)) for k in range(len(counts))]
    most = THRESHOLDS.lane_part * means[0]
    return max(count for count, seconds in zip(counts, means, strict=True) if seconds < most)


@dataclass(frozen=True, slots=True)
class Issue:
    """A device's own part of a collective of a tensor of E bytes: ``seconds + E per_byte`` seconds."""

    seconds: float = 0.0
    per_byte: float = 0.0


def measure_issue(session: Session) -> list[Issue]:
    """By rank, the device's own seconds for issuing a collective and taking in its result; none on GPUs, which do
    not issue their collectives.

    CPU time of the thread that computes, in the median over all-reduces, gathers and scatters that begin after
    other work has emptied the caches; times the seconds that a second of CPU time takes the thread while it
    computes (1 unless something limits it). The line through two sizes. Raises ProfileError on every rank if a rank
    fails.
    """
    if session.device.type == "cuda" or session.world == 1:
        return [Issue()] * session.world
    with session.guard("issuing collectives"):
        runtime = Runtime(session.communicator, Randomness(0, session.rank, session.device))
        cold = torch.ones(THRESHOLDS.issue_cold_bytes // 4)
        begin, used = perf_counter(), thread_time()
        while perf_counter() - begin < THRESHOLDS.pace_seconds:
            cold.add_(1.0)
        pace = max((perf_counter() - begin) / max(thread_time() - used, 1e-9), 1.0)
        sizes, seconds = [], []
        for nbytes, rounds in THRESHOLDS.issue_sizes:
            extents = [nbytes // 4 // session.world] * session.world
            whole, own = torch.ones(sum(extents)), torch.ones(extents[0])
            kinds = (
                partial(collectives.start_all_reduce, runtime, whole),
                partial(collectives.start_all_gather, runtime, own, 0, extents),
                partial(collectives.start_reduce_scatter, runtime, whole, 0, extents),
            )
            taken: list[float] = []
            for start_one in kinds * rounds:
                cold.add_(1.0)
                used = thread_time()
                start_one().wait()
                taken.append(pace * (thread_time() - used))
            sizes.append(4 * sum(extents))
            seconds.append(median(taken))
        per_byte = max((seconds[1] - seconds[0]) / (sizes[1] - sizes[0]), 0.0)
        mine = Issue(max(seconds[0] - per_byte * sizes[0], 0.0), per_byte)
        return [
            Issue(*map(float, other))
            for other in session.communicator.exchange((mine.seconds, mine.per_byte))
        ]


class _Bench:
    """Runs trials on this rank (None as ``own``: a rank that is not in the group and only hears the results)."""

    def __init__(self, session: Session, own: Communicator | None, deadline: float, tick: Tick) -> None:
        self.session = session
        self.own = own
        self.tick = tick
        self.clock = session.elapsed()
        self._one = torch.ones(1, device=session.device)
        self._buffer = torch.empty(0, device=session.device)
        randomness = Randomness(0, session.rank, session.device)
        self._runtime = None if own is None else Runtime(own, randomness)
        with session.guard("the first meeting"):
            self.clock = max(self._exchange([self.clock]))

    def allocate(self, nbytes: int) -> None:
        """Make room for operands of ``nbytes`` bytes."""
        if self.own is not None:
            self._buffer = torch.ones(nbytes // 4, device=self.session.device)

    def warm(self, cases: Sequence[_Case]) -> None:
        """Run each case as often as it has samples at first; none counts."""
        for case in cases:
            self.tick(f"{case.trial.kind} before the first sample")
            for _ in range(THRESHOLDS.first_samples):
                self._sample(case.trial)

    def visit(self, cases: Sequence[_Case], counts: Sequence[int], *, warm: bool) -> None:
        """Add ``counts[i]`` samples to ``cases[i]``, after one that does not count if ``warm``."""
        mine: list[float] = []
        for case, count in zip(cases, counts, strict=True):
            self.tick(f"{case.trial.kind} {case.trial.nbytes} B {case.trial.skew}")
            if warm:
                self._sample(case.trial)
            mine += [self._sample(case.trial) for _ in range(count)]
        slowest = self._exchange([*mine, self.session.elapsed()])
        self.clock = slowest.pop()
        at = 0
        for case, count in zip(cases, counts, strict=True):
            case.samples += slowest[at : at + count]
            at += count

    def rows(self, cases: Sequence[_Case]) -> list[float]:
        """Seconds of each case in the quickest of some rows of it."""
        seconds = []
        times, rows = THRESHOLDS.row_collectives, range(THRESHOLDS.rows)
        for case in cases:
            self.tick(f"{case.trial.kind} {case.trial.nbytes} B {case.trial.skew} in a row")
            seconds.append(min(self._exchange([self._sample(case.trial, times) for _ in rows])) / times)
        return seconds

    def _sample(self, trial: Trial, times: int = 1) -> float:
        """Seconds of a collective, or of several that are started one behind the other."""
        if self.own is None or self._runtime is None:
            return 0.0
        device = self.session.device
        shape = trial.shape(self.own.rank)
        count = 1
        for extent in shape:
            count *= extent
        operand = self._buffer[:count].view(shape)
        self.own.all_reduce(self._one).wait()
        synchronize(device)
        begin = perf_counter()
        for pending in [start(self._runtime, trial, operand) for _ in range(times)]:
            pending.wait()
        synchronize(device)
        return perf_counter() - begin

    def _exchange(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks' values, one by one."""
        device = self.session.device
        buffer = torch.tensor(values, dtype=torch.float64, device=device)
        output = torch.empty(self.session.world * len(values), dtype=torch.float64, device=device)
        self.session.communicator.all_gather(output, buffer).wait()
        largest: list[float] = output.view(self.session.world, -1).amax(0).tolist()
        return largest

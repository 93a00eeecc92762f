"""Plans for machines with several accelerators: across virtual devices, or flat, whichever is cheaper (HAP 3, 6).

Across virtual devices, search and ratios alternate over the machines as over any devices. Then a data parallel
program is searched for the accelerators within a machine, one for all machines, in even shares. Of the rows of
an instruction it may use those that can be had at once with the row that the machines use; an instruction none
of whose rows along the batch can is run alike on all accelerators of a machine. Both programs are proved.

The prediction of the step is that of the machines and what :mod:`hetspmd.cost.level_costs` adds. Where that is
much, the programs next to the best one are compared with it once more, each with what is added to it. A plan fits
if it fits each accelerator. Where it does not, the machines are planned again with less memory. The machines may
have several segments; inside, where all shares are even, those change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.machines import accelerator, flat, inside_cluster
from hetspmd.cost.coalesce import bucket_bytes
from hetspmd.cost.level_costs import inside_seconds, inside_seconds_in_turns
from hetspmd.cost.level_memory import inside_bytes
from hetspmd.cost.machine_turn_memory import inside_bytes_in_turns
from hetspmd.errors import HetspmdError, InfeasibleError, MemoryLimitError, SearchError
from hetspmd.optimize.alternation import nearest
from hetspmd.optimize.candidate import Candidate, certified
from hetspmd.optimize.compile_options import Machines, Segments
from hetspmd.optimize.considered import taken_instead, ways_taken, with_other_way
from hetspmd.optimize.segmentation import in_segments
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.optimize.synthesize import Outcome, candidate_at, synthesize
from hetspmd.optimize.zero_levels import synthesize_step
from hetspmd.plan.plan import Plan
from hetspmd.plan.reports import SINGLE_ACCELERATORS, VIRTUAL_DEVICES, Inside
from hetspmd.program.checker import check
from hetspmd.program.lengths import Lengths, by_segment, lengths_for
from hetspmd.program.level_layout import LevelLayout, RankPlace
from hetspmd.program.machine_turn_layout import MachineTurnLayout
from hetspmd.program.nested_turns import nest_turns
from hetspmd.program.nested_turns_check import check_nested_turns
from hetspmd.program.nesting import inner_rows, nest
from hetspmd.rules.rule import Triple
from hetspmd.rules.theory import Theory
from hetspmd.search import constraints as known
from hetspmd.search.constraints import Constraints
from hetspmd.search.earlier_prices import EarlierPrices

Step: TypeAlias = tuple[Outcome, Inside]
"""The best outcome of the machines, and what their accelerators do."""


def cheaper(
    cluster: Cluster, machines: Machines, flatly: Callable[[Cluster], Plan], across: Callable[[], Plan]
) -> Plan:
    """The cheaper of the two plans, or the one that is asked for, with the other's seconds among its baselines.

    A way that is impossible (nothing fits the memory, the constraints cannot be met) leaves the other one; if
    both are, raises what the flat one raised.
    """
    plans: list[Plan] = []
    failure: HetspmdError | None = None
    if machines != "virtual":
        try:
            plans.append(flatly(flat(cluster)))
        except (MemoryLimitError, InfeasibleError, SearchError) as error:
            failure = error
    if machines != "flat":
        try:
            plans.append(across())
        except (MemoryLimitError, InfeasibleError, SearchError) as error:
            failure = failure or error
    if not plans:
        assert failure is not None
        raise failure
    best = min(plans, key=lambda plan: plan.cost.step_seconds)
    if len(plans) < 2:
        return best
    side_by_side, virtual = plans
    names = {"single_accelerators": side_by_side} if best is virtual else {"virtual_devices": virtual}
    others = {name: plan.cost.step_seconds for name, plan in names.items()}
    return replace(
        best,
        baselines={**side_by_side.baselines, **best.baselines, **others},
        over_memory=side_by_side.over_memory,
        considered=ways_taken(
            {SINGLE_ACCELERATORS: side_by_side, VIRTUAL_DEVICES: virtual},
            VIRTUAL_DEVICES if best is virtual else SINGLE_ACCELERATORS,
        ),
    )


def step_across(ctx: Synthesis) -> Step:
    """The best step across virtual devices.

    In micro-batches, the collectives that are in the loop are those of the best candidate. Where the machines'
    memory is short as it is counted of them, the best step without regard to it is the best one if the accelerators
    have the memory for it. Raises what :func:`hetspmd.optimize.synthesize.synthesize` raises, and MemoryLimitError
    where the accelerators' memory does not suffice.
    """
    try:
        step = _within_memory(ctx)
    except MemoryLimitError:
        if (roomy := _without_regard(ctx)) is None:
            raise
        return roomy
    if step[0].rounds is not None or (roomy := _without_regard(ctx)) is None:
        return step
    return min(step, roomy, key=lambda s: s[0].best.seconds + s[1].seconds)


def _best_of(ctx: Synthesis) -> Outcome:
    return synthesize(ctx) if ctx.batches is None else synthesize_step(ctx)[1]


def _without_regard(ctx: Synthesis) -> Step | None:
    """The best step of machines of any memory, if the accelerators have the memory for it."""
    devices = tuple(replace(device, memory=math.inf) for device in ctx.cluster.devices)
    outcome = _best_of(replace(ctx, cluster=replace(ctx.cluster, devices=devices), bound=None))
    step = counting_inside(ctx, (outcome, inside_of(of_candidate(ctx, outcome.best), outcome.best)))
    return None if lacking(ctx.cluster, step[1]) else step


def _within_memory(ctx: Synthesis) -> Step:
    """The best step of machines that hold what they have memory for, as it is counted of them. Where that does not
    suffice for their accelerators, they are planned again with less."""
    tight = ctx
    names = [d.name for d in ctx.cluster.devices]
    nearest_one: MemoryLimitError | None = None
    for _ in range(ctx.thresholds.machine_memory_attempts):
        try:
            outcome = _best_of(tight)
        except MemoryLimitError:
            if nearest_one is None:
                raise
            break  # the memory that it tells of is what the last turn has left, not what a machine has
        inside = inside_of(of_candidate(ctx, outcome.best), outcome.best)
        missed = lacking(ctx.cluster, inside)
        if not missed:
            return counting_inside(ctx, (outcome, inside))
        nearest_one = nearest(nearest_one, MemoryLimitError(missed, names, "machine"))
        devices = list(tight.cluster.devices)
        for rank, (missing, capacity) in missed.items():
            device = devices[rank]
            # What the machines are counted to hold must shrink by as much as an accelerator lacks.
            held = min(device.memory, outcome.best.cost.memory_bytes[rank])
            part = capacity / (capacity + missing) * ctx.thresholds.machine_memory_part
            memory = max(held * part, 1.0)
            devices[rank] = replace(device, memory=memory)
        tight = replace(tight, cluster=replace(tight.cluster, devices=tuple(devices)))
    assert nearest_one is not None
    raise nearest_one


def counting_inside(ctx: Synthesis, step: Step) -> Step:
    """The best step of the same machines, counting what the accelerators add to each candidate. ``step`` has the
    candidate that is the best without that, whose accelerators may lack memory.

    Of the candidates that compute alike at the same ratios, only the fastest is looked at: how parameters are
    stored and how far ahead they are gathered changes little inside.
    """
    outcome, inside = step
    least, without_gain = outcome.best.seconds + inside.seconds, 1 - ctx.thresholds.inside_gain
    if lacking(ctx.cluster, inside):
        least = math.inf
    chosen: Candidate | None = None
    others = _computing_otherwise(ctx.theory, outcome, least * without_gain)
    for candidate in others[: ctx.thresholds.inside_candidates]:
        if candidate.seconds >= least * without_gain:
            break
        try:
            own = inside_of(of_candidate(ctx, candidate), candidate)
        except (InfeasibleError, SearchError):
            continue
        if candidate.seconds + own.seconds < least and not lacking(ctx.cluster, own):
            chosen, inside, least = candidate, own, candidate.seconds + own.seconds
    if chosen is None:
        return step
    best = certified(chosen.evaluator.ctx, chosen)
    return replace(outcome, best=best, considered=taken_instead(outcome.considered, chosen)), inside


def _computing_otherwise(theory: Theory, outcome: Outcome, most: float) -> list[Candidate]:
    """The candidates on the machines of the best one that take fewer than ``most`` seconds, the fastest of those
    that run the same triples at the same ratios, and none that does so as the best one; the fastest first."""
    graph, best = theory.graph, outcome.best
    computed = [
        i
        for i, instruction in enumerate(graph.instructions)
        if not instruction.is_source and i not in graph.second_reads
    ]

    def computation(candidate: Candidate) -> object:
        return tuple(candidate.result.rows[i] for i in computed), candidate.ratios

    possible = [
        c
        for c in outcome.candidates
        if c.active == best.active and c.stages.lower_bound < most and c.fits and c.seconds < most
    ]
    fastest = {computation(best): best}
    for candidate in sorted(possible, key=lambda candidate: candidate.seconds):
        fastest.setdefault(computation(candidate), candidate)
    return list(fastest.values())[1:]


def segments_across(
    ctx: Synthesis, step: Step, segments: Segments, constraints: Callable[[Theory], Constraints]
) -> tuple[Synthesis, Step]:
    """The best step across virtual devices beside ``step``, the best of one segment, and the synthesis that gave it
    (:func:`~hetspmd.optimize.segmentation.in_segments`).

    With what the accelerators add, one of several segments must be shorter, unless a number of segments is asked
    for. One whose accelerators' memory does not suffice is not taken, nor one of which they have no program.
    """
    outcome, inside = step
    # What the accelerators add is not in the rounds, which thus do not tell whether cuts gain.
    synthesis, other = in_segments(ctx, replace(outcome, rounds=None), segments, constraints)
    if synthesis is ctx:
        return ctx, (other, inside)
    try:
        own = inside_of(of_candidate(synthesis, other.best), other.best)
    except (InfeasibleError, SearchError):
        # The copies at cuts, which accelerators divide, are read by what they must run alike.
        return ctx, step
    one = outcome.best.seconds + inside.seconds
    longer = other.best.seconds + own.seconds >= one
    missed = {rank: missing for rank, (missing, _) in lacking(ctx.cluster, own).items()}
    if missed or (segments == "auto" and longer):
        return ctx, (
            replace(outcome, considered=with_other_way(outcome.considered, other.considered, missed)),
            inside,
        )
    return synthesis, (replace(other, baselines={"one_segment": one}), own)


def of_candidate(ctx: Synthesis, candidate: Candidate) -> Synthesis:
    """The synthesis in whose loop over micro-batches the collectives of a candidate are."""
    batches = candidate.evaluator.ctx.batches
    return ctx if batches is None else ctx.with_repeated(batches.repeated)


def lacking(cluster: Cluster, inside: Inside) -> dict[int, tuple[int, int]]:
    """Machines whose accelerators do not have the memory, to the bytes that one of them lacks and those it has."""
    return {
        rank: (needed - int(accelerator(device).memory), int(accelerator(device).memory))
        for rank, (device, needed) in enumerate(zip(cluster.devices, inside.memory_bytes, strict=True))
        if needed > accelerator(device).memory
    }


def inside_of(ctx: Synthesis, candidate: Candidate) -> Inside:
    """What the accelerators of the machines do of the best step of the machines. ``candidate`` is of machines of
    the synthesis's cluster and, in micro-batches, of its loop.

    Raises what the search raises.
    """
    theory, cluster, lengths, batches = ctx.theory, ctx.cluster, candidate.lengths, ctx.batches
    counts = [cluster.accelerators[j] for j in candidate.active]
    within = inside_cluster(cluster, candidate.active)
    shares = by_segment((1.0 / within.world,) * within.world, theory.axes.segments)
    composing = _Composing(ctx, lengths, counts, inner_rows(candidate.program))
    own = replace(
        ctx,
        cluster=within,
        constraints=_data_parallel(theory, composing),
        prepared=None,
        earlier_prices=EarlierPrices(),
        bound=None,
    )
    inner = candidate_at(own, shares, lengths_for(theory.axes, shares), own.everyone).program
    check(theory, inner)
    costs, size = ctx.costs(candidate.active), bucket_bytes(within)
    outer, layout = (candidate.program, candidate.schedule), composing.layout
    if batches is not None:
        assert isinstance(layout, MachineTurnLayout)
        steps = nest_turns(theory, outer, batches, inner, size)
        check_nested_turns(theory, batches.loop, candidate.program, inner, steps)
        seconds = inside_seconds_in_turns(costs, lengths, steps, layout)
        each = inside_bytes_in_turns(layout, steps, candidate.arrivals)
    else:
        nested = nest(theory, *outer, inner, size)
        seconds = inside_seconds(costs, lengths, nested, layout)
        each = inside_bytes(layout, nested, candidate.arrivals)
    held = dict(zip(candidate.active, each, strict=True))
    return Inside(inner, seconds, tuple(held.get(j, 0) for j in range(cluster.world)), size)


class _Composing:
    """Which rows of an instruction accelerators can run within machines that run the rows ``outer`` and, in
    micro-batches, in turns."""

    def __init__(
        self, ctx: Synthesis, lengths: Lengths, counts: list[int], outer: Mapping[int, Triple]
    ) -> None:
        theory, batches = ctx.theory, ctx.batches
        self._theory, self._outer, self._known = theory, outer, dict[object, bool]()
        self.layout: LevelLayout
        if batches is None:
            self._times: Sequence[tuple[Triple, ...]] = [()] * len(theory.graph.instructions)
            self.layout = LevelLayout(theory, lengths, counts)
            self._places: Sequence[RankPlace] = self.layout.places
        else:
            self._times = [(row,) for row in batches.loop.rows]
            self.layout = layout = MachineTurnLayout(theory, batches, lengths, counts)
            self._places = [RankPlace(t, r) for t in layout.alike_turns for r in range(sum(counts))]

    def __call__(self, instruction: int, row: Triple) -> bool:
        """Whether a row composes with those of the levels above."""
        rows, layout = (*self._times[instruction], self._outer[instruction], row), self.layout
        held = [layout.held(instruction, rows, at) for at in self._places]
        # What is made of the rows depends on how many units are held, not on which.
        sizes = [tuple(level.units[1] - level.units[0] for level in levels) for levels in held]
        key = (id(self._theory.calls[instruction]), rows, tuple(sizes))
        if key not in self._known:
            places = dict(zip(sizes, self._places, strict=True)).values()
            self._known[key] = all(layout.call(instruction, rows, at) is not None for at in places)
        return self._known[key]


def _data_parallel(theory: Theory, composes: Callable[[int, Triple], bool]) -> Constraints:
    """Data parallelism within machines, by rows that compose."""
    wanted = known.data_parallel(theory)
    assert wanted.row_filter is not None
    batch, divided = theory.batch_axes, wanted.row_filter
    along: dict[int, bool] = {}

    def divisible(instruction: int) -> bool:
        if instruction not in along:
            pairs = zip(theory.rows[instruction], theory.row_axes[instruction], strict=True)
            along[instruction] = any(a in batch and composes(instruction, r) for r, a in pairs)
        return along[instruction]

    def allowed(instruction: int, row: Triple, axis: int | None) -> bool:
        if theory.graph.instructions[instruction].is_source:
            return divided(instruction, row, axis)
        asked = divided(instruction, row, axis) or (axis is None and not divisible(instruction))
        return asked and composes(instruction, row)

    return Constraints(wanted.forms, allowed)

"""Seconds of a model's ops on each kind of device, at several shares, and the lines through them.

The ranks of a kind share its tasks (:mod:`hetspmd.profile.cases`), and all kinds measure at the same time, as in
training. A local call is lowered as the runtime lowers it and called as generated code calls it, without gradients,
on inputs that rotate through an arena larger than caches: in a step, too, an op's weights and what the
backward reads of the forward come from memory, since everything else has passed through the caches in between. A
sample is as many calls as last ``sample_seconds``. Calls on a CPU are timed one by one, with other work between
them (:mod:`hetspmd.profile.single`), unless several threads compute long ones. The optimizer's step is measured on
as many parameters of a shape as fill the arena, so that its own overhead is spread as over a model's.

A machine may be slow for seconds on end, and what is measured then would look dear beside all the rest. So there
are ``op_turns`` turns, each of which samples every task (:mod:`hetspmd.profile.timing`), and the median of the
turns' medians counts, of the samples whose memory has settled (:mod:`hetspmd.profile.pages`).

A key's line ``constant + slope share`` is the non-negative least squares solution for the logarithms of its points
(:mod:`hetspmd.profile.fit`); it is convex in the share, whatever the noise.

What fails on a device, or is not reached in time, has no line: the cost model keeps the roofline for it, scaled
where the same call was measured whole.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.op_times import OpFit, OpFits, OpTime
from hetspmd.cost.op_keys import VIEW_KEY
from hetspmd.profile.cache import Points, cache_file, load_points, save_points
from hetspmd.profile.cases import OpCase, Task, tasks_of
from hetspmd.profile.device import OPTIMIZERS, synchronize
from hetspmd.profile.fit import relative_least_squares
from hetspmd.profile.grouping import kinds_of
from hetspmd.profile.host import host_identity
from hetspmd.profile.local_op import Alone, Arena, local_op
from hetspmd.profile.pages import Sample, page_faults, settled, settling
from hetspmd.profile.profile_thresholds import THRESHOLDS
from hetspmd.profile.session import Session
from hetspmd.profile.single import SingleCalls
from hetspmd.profile.timing import interval, repeat
from hetspmd.rules.rule import TensorType
from hetspmd.rules.theory import Theory
from hetspmd.trace.graph import ITEM_SIZES
from hetspmd.trace.values import torch_dtype


@dataclass(frozen=True)
class OpReport:
    """Lines by kind of device, how many keys and tasks there were, how many of the tasks were measured now and how
    many came from the cache, and why some failed."""

    ops: OpFits
    keys: int
    tasks: int
    measured: int
    cached: int
    failed: tuple[str, ...]

    def __str__(self) -> str:
        lines = min((len(fits) for _, fits in self.ops), default=0)
        text = (
            f"lines for {lines} of {self.keys} keys; {self.measured} of {self.tasks} points measured, "
            f"{self.cached} from the cache"
        )
        return text + (f", {len(self.failed)} failed, such as {self.failed[0]}" if self.failed else "")


@dataclass
class _Done:
    """What one rank measured of its tasks."""

    points: Points = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def measure_ops(
    session: Session,
    cluster: Cluster,
    cases: Sequence[OpCase],
    budget: float,
    tolerance: float,
    optimizer: str = "adamw",
    tick: Callable[[str], None] = lambda what: None,
) -> OpReport:
    """Measure ``cases`` on every kind of device of ``cluster``, for about ``budget`` seconds from now.

    The same cases on every rank. Every rank gets the same report. Raises ProfileError on every rank if one fails.
    """
    device = session.device
    kinds = kinds_of(cluster.devices)
    mine = next(kind for kind in kinds if session.rank in kind)
    file = cache_file(device, cluster.devices[session.rank], optimizer)
    stored = session.together("reading the cache of op times", lambda: load_points(file))
    points_by_kind = [_merged([stored[r] for r in kind]) for kind in kinds]
    tasks = [t for t in tasks_of(cases) if device.type == "cpu" or t.key != VIEW_KEY]
    have = points_by_kind[kinds.index(mine)]
    todo = [t for t in tasks if t.share not in have.get(t.key, {})]
    own_tasks = todo[mine.index(session.rank) :: len(mine)]
    room = THRESHOLDS.memory_part * cluster.devices[session.rank].memory
    done = session.together(
        "measuring ops", lambda: _measure(device, own_tasks, budget, tolerance, optimizer, room, tick)
    )
    hosts = session.together("naming the host", host_identity)
    ops = []
    for index, kind in enumerate(kinds):
        merged = _merged([points_by_kind[index], *(done[r].points for r in kind)])
        ops.append((kind, fit_points(cases, merged)))
        new = _merged([done[r].points for r in kind])
        if (
            new
            and session.rank == next((r for r in mine if hosts[r] == hosts[session.rank]), -1)
            and kind == mine
        ):
            save_points(file, new)
    measured = sum(len(of_key) for d in done for of_key in d.points.values())
    cached = sum(t.share in points.get(t.key, {}) for t in tasks for points in points_by_kind)
    failed = tuple(dict.fromkeys(reason for d in done for reason in d.failed))
    return OpReport(tuple(ops), len(cases), len(tasks) * len(kinds), measured, cached, failed)


def fit_points(cases: Sequence[OpCase], points: Points) -> tuple[OpFit, ...]:
    """The lines of the cases that were measured: what is whole at the share 1, what is cut at another share too."""
    fits: dict[str, OpFit] = {}
    for case in cases:
        at = {share: p[0] for share, p in points.get(case.key, {}).items() if share < 1}
        if case.key == case.whole or at:
            at |= {share: p[0] for share, p in points.get(case.whole, {}).items() if share == 1}
        if at:
            fits[case.key] = _fit(case, tuple(sorted(at.items())))
    return tuple(fits[key] for key in sorted(fits))


def _fit(case: OpCase, points: tuple[tuple[float, float], ...]) -> OpFit:
    shares, seconds = (np.array(column) for column in zip(*points, strict=True))
    if case.key == case.whole:
        constant, slope = points[-1][1], 0.0
    elif len(points) == 1:
        constant, slope = 0.0, points[0][1] / points[0][0]
    else:
        matrix = np.stack([np.ones_like(shares), shares], axis=1)
        constant, slope = relative_least_squares(matrix, seconds).tolist()
    time = OpTime(case.key, _rounded(constant), _rounded(slope))
    error = max(abs(time.seconds(share) / t - 1) for share, t in points)
    return OpFit(time, _rounded(error, 3), tuple((_rounded(s), _rounded(t)) for s, t in points))


def _rounded(value: float, digits: int = 4) -> float:
    """More digits than were measured, and a file that can be read."""
    return float(f"{value:.{digits}g}")


def _merged(parts: Sequence[Mapping[str, Mapping[float, Any]]]) -> Points:
    points: Points = {}
    for part in parts:
        for key, of_key in part.items():
            points.setdefault(key, {}).update(of_key)
    return points


def _measure(
    device: torch.device,
    tasks: Sequence[Task],
    budget: float,
    tolerance: float,
    optimizer: str,
    room: float,
    tick: Callable[[str], None],
) -> _Done:
    done = _Done()
    begin = perf_counter()
    arena = Arena(device, _arena_bytes(device))
    single = SingleCalls() if device.type == "cpu" else None
    theories: dict[int, tuple[Alone, Theory]] = {}
    measured: dict[str, dict[float, list[list[Sample]]]] = {}
    queue = list(tasks)
    for turn in range(THRESHOLDS.op_turns):
        due = begin + budget * (turn + 1) / THRESHOLDS.op_turns
        todo, queue = queue, []
        for index, task in enumerate(todo):
            now = perf_counter()
            if now >= begin + budget:
                break
            tick(task.key)
            deadline = now + (due - now) / (len(todo) - index)
            try:
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    call, parts = _call(device, arena, task, theories, optimizer, room)
                    samples = _samples(device, call, single, deadline, tolerance)
            # A kernel may raise anything on made-up inputs: the op keeps the roofline.
            except Exception as error:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                done.failed.append(f"{task.case.key.split('(')[0]}: {reason}")
                continue
            queue.append(task)
            measured.setdefault(task.key, {}).setdefault(task.share, []).append(
                [Sample(t / parts, faults) for t, faults in samples]
            )
    for key, of_key in measured.items():
        done.points[key] = {share: _point(turns) for share, turns in of_key.items()}
    return done


def _point(turns: Sequence[Sequence[Sample]]) -> tuple[float, float, float, int]:
    """Seconds, an interval around them, and of how many samples, of the samples of each turn."""
    fewest = min(faults for samples in turns for _, faults in samples)
    turn_seconds = [seconds for samples in turns if (seconds := settled(samples, fewest))]
    middle = median(map(median, turn_seconds))
    together = [t for seconds in turn_seconds for t in seconds]
    _, low, high = interval(together)
    return middle, min(low, middle), max(high, middle), len(together)


def _samples(
    device: torch.device,
    call: Callable[[], object],
    single: SingleCalls | None,
    deadline: float,
    tolerance: float,
) -> list[Sample]:
    def run(calls: int) -> Sample:
        synchronize(device)
        faults, start = page_faults(), perf_counter()
        for _ in range(calls):
            call()
        synchronize(device)
        return Sample((perf_counter() - start) / calls, (page_faults() - faults) / calls)

    run(1)  # the first call may compile or choose kernels
    once = 0.0 if single is not None and single.alone else run(2).seconds
    if single is not None and once < THRESHOLDS.single_call_seconds:
        take = partial(single.sample, call)
    else:
        take = partial(run, min(max(int(THRESHOLDS.sample_seconds / once), 1), THRESHOLDS.calls_of_sample))
    samples: list[Sample] = []

    def seconds() -> float:
        samples.append(take())
        return samples[-1].seconds

    repeat(seconds, deadline, tolerance, least=1)
    while device.type == "cpu" and settling(samples):
        seconds()
    return samples


def _call(
    device: torch.device,
    arena: Arena,
    task: Task,
    theories: dict[int, tuple[Alone, Theory]],
    optimizer: str,
    room: float,
) -> tuple[Callable[[], object], int]:
    """What is timed, and how often it does the task. Raises MemoryError if it needs more than ``room`` bytes."""
    case = task.case
    if case.stored is not None:
        return _step(device, *case.stored, task.held, optimizer, room)
    assert case.op is not None
    own, row = case.op
    if id(own) not in theories:
        theories[id(own)] = own, own.theory
    op = local_op(theories[id(own)][1], own.orders, row, task.held, device)
    _check_room(op.held, room)
    number = min(max(arena.nbytes // max(op.nbytes, 1), 1), THRESHOLDS.input_sets)
    sets = [op.make(arena) for _ in range(number)]
    turn = count()

    def call() -> object:
        return op.run(op.runtime, *sets[next(turn) % len(sets)])

    return call, 1


def _step(
    device: torch.device, type_: TensorType, dim: int | None, held: int, optimizer: str, room: float
) -> tuple[Callable[[], object], int]:
    """The optimizer's step on parameters of a stored shape, as many as fill the arena."""
    shape = list(type_.shape)
    if dim is not None:
        shape[dim] = held
    nbytes = 4 * max(math.prod(shape) * ITEM_SIZES[type_.dtype], 1)  # with gradients and state
    number = min(max(_arena_bytes(device) // nbytes, 1), THRESHOLDS.input_sets)
    _check_room(number * nbytes, room)
    parameters = [torch.ones(shape, device=device, dtype=torch_dtype(type_.dtype)) for _ in range(number)]
    for p in parameters:
        p.grad = torch.full_like(p, 0.5)
    return OPTIMIZERS[optimizer](parameters).step, number


def _arena_bytes(device: torch.device) -> int:
    return THRESHOLDS.gpu_arena_bytes if device.type == "cuda" else THRESHOLDS.cpu_arena_bytes


def _check_room(nbytes: int, room: float) -> None:
    if nbytes > room:
        raise MemoryError(f"it needs {nbytes / 2**20:.0f} MiB, more than half of the device's memory")

"""Memory follows completion: collectives let go of their sources when they are done, not when waited for.

Live bytes are those of all storages that ops have returned and that still exist, counted apart from the runtime.
A ZeRO-like program (parameters in shards, the batch divided) reduces every gradient to shards that are only
results, so that all of them are waited for at the end of backward.
"""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from program_builder import data_parallel
from ranks import own_gradient
from small_models import Case
from small_plans import handmade_plan
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetspmd.cluster.collective_kinds import Kind, kinds_between
from hetspmd.cost.memory import Holdings
from hetspmd.dist import collectives
from hetspmd.dist.communicator import Communicator, Work
from hetspmd.dist.pending import Pending
from hetspmd.dist.process_group import ProcessGroupCommunicator
from hetspmd.dist.random import Randomness
from hetspmd.dist.runtime import Runtime
from hetspmd.dist.simulated_world import SimulatedCommunicator, run_ranks
from hetspmd.plan.plan import Plan
from hetspmd.program.lengths import lengths_for
from hetspmd.program.program import Communicate, Program
from hetspmd.rules.theory import derive
from hetspmd.run.module import HAP
from hetspmd.run.shard_tensors import plain
from hetspmd.trace.trace import trace
from processes import spawn

RATIOS = (4 / 7, 2 / 7, 1 / 7)
WORLD = len(RATIOS)
LAYERS, WIDTH, BATCH = 16, 112, 21
GRADIENT = 4 * WIDTH * WIDTH
ALL_GRADIENTS = LAYERS * GRADIENT


class Stack(nn.Module):
    """Equal linear layers: gradients of equal size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return F.cross_entropy(x, labels)


def model_and_batch() -> tuple[nn.Module, dict[str, Any]]:
    """The same in every process."""
    torch.manual_seed(0)
    return Stack(), {"x": torch.randn(BATCH, WIDTH), "labels": torch.randint(0, WIDTH, (BATCH,))}


@cache
def zero_like(reduction: Kind) -> tuple[Case, Plan]:
    """Parameters in shards, gathered in forward; gradients reduced by ``reduction``."""
    model, batch = model_and_batch()
    theory = derive(trace(model, (), batch))
    made = data_parallel(theory, theory.graph.inputs[0].tensor, sharded_parameters=True)
    gradients = {p.gradient for p in theory.graph.parameters}
    steps = tuple(
        Communicate(s.tensor, reduction, s.source, s.target)
        if isinstance(s, Communicate) and s.tensor in gradients
        else s
        for s in made.steps
    )
    reduced = [s for s in steps if isinstance(s, Communicate) and s.kind == reduction]
    assert len(reduced) == LAYERS
    program = Program(steps, made.loss, made.outputs, made.gradients, made.buffers)
    case = Case(model, batch, theory)
    return case, handmade_plan(case, program, lengths_for(theory.axes, RATIOS))


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Bytes of the storages that ops returned in this context, on this thread, and that exist."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.current = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        self._lock = threading.RLock()  # a storage may die on another rank's thread

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return result

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            found = self._known.get(key)
            if found is not None and found() is not None:
                return
            self._known[key] = weakref.ref(storage, partial(self._died, key, size))
            self.current += size
            self.peak = max(self.peak, self.current)

    def _died(self, key: int, size: int, reference: Any) -> None:
        with self._lock:
            self.current -= size
            if self._known.get(key) is reference:
                del self._known[key]


def paced(base: type[Any], live: Live, at: list[int]) -> type[Any]:
    """A communicator whose network is faster than its devices: every reduction has completed, unseen by the
    runtime, before the device goes on. ``at`` gets the live bytes when each begins."""

    class Paced(base):  # type: ignore[misc]  # its base is an argument
        def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor, *, spare: bool = False) -> Work:
            at.append(live.current)
            return self._paced(super().reduce_scatter(output, buffer, spare=spare))

        def reduce(self, buffer: torch.Tensor, root: int) -> Work:
            at.append(live.current)
            return self._paced(super().reduce(buffer, root))

        def _paced(self, work: Work) -> Work:
            while not work.is_completed():
                pause.wait(1e-4)
            return work

    pause = threading.Event()
    return Paced


def step(
    model: nn.Module,
    inputs: dict[str, Any],
    plan: Plan,
    rank: int,
    make: Callable[[Live, list[int]], Communicator],
) -> dict[str, Any]:
    """One step on a rank: the bytes it holds, before, at most and when each reduction begins, and its results."""
    live = Live()
    at: list[int] = []
    communicator = make(live, at)
    quiet = {"check_plan": False, "check_batches": False}  # what checks take is not what a step holds
    hap = HAP(copy.deepcopy(model), plan.cluster, plan=plan, process_group=communicator, **quiet)
    with live:
        for parameter in hap.parameters():
            live.see(parameter)
        batch = {k: v.clone() for k, v in inputs.items()}
        before = live.current
        loss = hap(**batch)
        loss.backward()
    gradients = [own_gradient(p) for p in hap.parameters() if p.grad is not None]
    assert [g.untyped_storage().nbytes() for g in gradients] == [
        p.numel() * 4 for p in plain(hap.parameters())
    ]
    assert all(pending.settle() and not pending._works for pending in communicator.in_flight)
    communicator.exchange(None)  # every rank has its part of every sum
    assert becomes(lambda: live.current <= before + sum(g.numel() * 4 for g in gradients) + GRADIENT / 10)
    return {
        "before": before, "peak": live.peak, "at": at,
        "loss": loss.detach(), "gradients": gradients, "rank": rank,
    }  # fmt: skip


def check(case: Case, plan: Plan, reduction: Kind, found: dict[str, Any]) -> None:
    """Near to the prediction, and far below what holding all whole gradients would come to."""
    rank = found["rank"]
    profile = Holdings(case.theory, plan.program, plan.schedule, optimizer_bytes=0).at(plan.lengths)
    predicted = int(profile.peaks[rank])
    staged = GRADIENT if reduction == "grouped_reduce" else WORLD * max(RATIOS) * GRADIENT
    # Beyond the prediction: a gradient and what is sent of it, of the reduction that begins and the one before; in
    # the simulation also sums that the other ranks have not taken yet.
    assert found["peak"] <= predicted + 3 * GRADIENT + 3 * staged
    # When the last reduction begins, the other gradients are held in shards only.
    shards = sum(g.numel() * 4 for g in found["gradients"])
    assert found["at"][-1] - found["before"] - shards < ALL_GRADIENTS / 2


def simulated(reduction: Kind) -> list[dict[str, Any]]:
    case, plan = zero_like(reduction)
    _ = plan.theory, plan.digest

    def body(comm: Communicator) -> dict[str, Any]:
        assert isinstance(comm, SimulatedCommunicator)

        def make(live: Live, at: list[int]) -> Communicator:
            made = paced(SimulatedCommunicator, live, at)(comm.meeting, comm.rank)
            assert isinstance(made, Communicator)
            return made

        return step(case.model, case.batch, plan, comm.rank, make)

    return run_ranks(WORLD, body)


def worker(rank: int, world: int, folder: str) -> None:
    """One gloo process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found: dict[str, Any] = {}
    for reduction in REDUCTIONS:
        model, batch = model_and_batch()
        plan = Plan.load(f"{folder}/{reduction}")
        found[reduction] = step(model, batch, plan, rank, lambda *a: paced(ProcessGroupCommunicator, *a)())
    found["settled"] = settled(ProcessGroupCommunicator())
    found["same"] = same_bits(ProcessGroupCommunicator())
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def becomes(true: Callable[[], bool]) -> bool:
    """Whether it is true within a second: gloo's threads hold on to complete work for another moment."""
    for _ in range(1000):
        if true():
            return True
        time.sleep(1e-3)
    return False


def settled(comm: Communicator) -> list[bool]:
    """For each kind of collective: whether its source outlives it until the next one starts."""
    runtime = Runtime(comm, Randomness(0, comm.rank, torch.device("cpu")))
    extents = (4, 2, 0)
    starts: list[tuple[Callable[..., Pending], tuple[Any, ...], int]] = [
        (collectives.start_all_reduce, (), 6),
        (collectives.start_reduce_scatter, (0, extents), 6),
        (collectives.start_reduce_scatter, (0, (2, 2, 2)), 6),
        (collectives.start_grouped_reduce, (0, extents), 6),
        (collectives.start_ring_reduce, (0, extents), 6),
        (collectives.start_exchange_reduce, (0, extents), 6),
        (collectives.start_all_gather, (0, extents), extents[comm.rank]),
        (collectives.start_all_gather, (0, (2, 2, 2)), 2),
        (collectives.start_grouped_broadcast, (0, extents), extents[comm.rank]),
        (collectives.start_ring_gather, (0, extents), extents[comm.rank]),
        (collectives.start_all_to_all, (0, 1, extents, (1, 1, 1)), extents[comm.rank]),
    ]
    results: dict[Any, Callable[[int, Any], int]] = {start: lambda rank, args: 18 for start, _, _ in starts}
    for kind in kinds_between("partial", "shard"):
        results[collectives.STARTS[kind].one] = lambda rank, args: 3 * args[1][rank]
    results[collectives.start_all_to_all] = lambda rank, args: 6
    found: list[bool] = []
    for start, args, rows in starts:
        live = Live()
        with live:
            pending = start(runtime, torch.ones(rows, 3), *args)
            while not all(work.is_completed() for work in pending._works):
                pass
            last = collectives.start_all_reduce(runtime, torch.ones(1))
            comm.exchange(None)  # so that every rank has started it
            most = 4 * (results[start](comm.rank, args) + 2)  # and what the small one needs
            found.append(not becomes(lambda live=live, most=most: live.current <= most))
            assert pending.wait().numel() == results[start](comm.rank, args)
            last.wait()
        comm.exchange(None)
    return found


def same_bits(comm: Communicator) -> bool:
    """Whether sums are those of torch's own reduce-scatter."""
    torch.manual_seed(comm.rank)
    same = True
    for rows in (1, 7, 1000, 40_000):
        x = torch.randn(comm.world * rows)
        want = torch.empty(rows)
        dist.reduce_scatter_tensor(want, x)
        got = collectives.start_reduce_scatter(
            Runtime(comm, Randomness(0, comm.rank, torch.device("cpu"))), x, 0, (rows,) * comm.world
        ).wait()
        same = same and torch.equal(got, want)
    return same


REDUCTIONS: tuple[Kind, ...] = ("reduce_scatter", "grouped_reduce")


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("inflight")
    for reduction in REDUCTIONS:
        zero_like(reduction)[1].save(folder / reduction)
    spawn(worker, (WORLD, str(folder)), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_zero_like_over_gloo(processes: list[dict[str, Any]], reduction: Kind) -> None:
    case, plan = zero_like(reduction)
    for found in processes:
        check(case, plan, reduction, found[reduction])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_zero_like_simulated(processes: list[dict[str, Any]], reduction: Kind) -> None:
    case, plan = zero_like(reduction)
    model = copy.deepcopy(case.model)
    loss = model(**case.batch)
    loss.backward()
    for found, real in zip(simulated(reduction), processes, strict=True):
        check(case, plan, reduction, found)
        torch.testing.assert_close(found["loss"], loss.detach())
        torch.testing.assert_close(found["gradients"], real[reduction]["gradients"], rtol=1e-5, atol=1e-7)


def test_a_complete_collective_keeps_its_result_only(processes: list[dict[str, Any]]) -> None:
    assert [found["settled"] for found in processes] == [[False] * 11] * WORLD
    assert run_ranks(WORLD, settled) == [[False] * 11] * WORLD


def test_sums_over_gloo_are_torchs(processes: list[dict[str, Any]]) -> None:
    assert all(found["same"] for found in processes)


class Manual:
    """Work that completes when told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.done, self.waits, self.error = False, 0, error

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> object:
        self.waits += 1
        if self.error is not None:
            raise self.error
        self.done = True
        return None


def test_nothing_is_let_go_before_it_is_complete() -> None:
    """Works of one collective go one by one, collectives oldest first; results are made early only if asked."""

    def body(comm: Communicator) -> None:
        made: list[str] = []

        def pending(name: str, works: list[Manual], early: bool) -> Pending:
            return Pending(works, lambda: (made.append(name), torch.zeros(1))[1], comm, early=early)

        a, b, c = [Manual(), Manual()], [Manual()], [Manual()]
        first, second, third = pending("a", a, True), pending("b", b, False), pending("c", c, True)
        comm.settle()
        assert (first._works, len(comm.in_flight)) == (a, 3)
        a[1].done = b[0].done = True
        comm.settle()
        assert first._works == a[:1]
        assert (second._works, len(comm.in_flight), b[0].waits) == (b, 3, 0)
        a[0].done = True
        comm.settle()
        assert list(comm.in_flight) == [third]
        assert (made, [w.waits for w in (*a, *b, *c)]) == (["a"], [1, 1, 1, 0])
        third.wait()
        assert (made, len(comm.in_flight), c[0].waits) == (["a", "c"], 0, 1)
        second.wait()
        first.wait()
        assert made == ["a", "c", "b"]
        assert [w.waits for w in (*a, *b, *c)] == [1, 1, 1, 1]

    run_ranks(1, body)


def test_an_error_is_raised_once_and_forgotten() -> None:
    def body(comm: Communicator) -> None:
        broken = Manual(ConnectionError("gone"))
        broken.done = True
        Pending([broken], lambda: torch.zeros(1), comm)
        with pytest.raises(ConnectionError, match="gone"):
            comm.settle()
        comm.settle()
        assert not comm.in_flight

    run_ranks(1, body)

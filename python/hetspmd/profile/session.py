"""The ranks that measure together: joining them, and failing together.

Work that needs no other rank is run by :meth:`Session.together`: all ranks exchange whether it went well, and if
it failed on one, every rank raises the same ProfileError. A rank that fails between collectives cannot reach the
others, which wait for it; it leaves the reason in the group's store and ends, its connections close, and the
others find the reason there (:meth:`Session.guard`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from hetspmd.dist.communicator import Communicator, LoneCommunicator
from hetspmd.dist.process_group import communicator_for
from hetspmd.errors import ProfileError
from hetspmd.profile.host import host_name
from hetspmd.profile.profile_thresholds import THRESHOLDS

T = TypeVar("T")
_FAILURE = "hetspmd/profile/failure"


@dataclass
class Session:
    """``communicator`` joins all ranks; ``device`` is this rank's; ``backend`` as in torch.distributed (None: one
    rank); ``start`` is the time on ``perf_counter`` at which the ranks met."""

    communicator: Communicator
    device: torch.device
    backend: str | None = None
    store: Store | None = None
    start: float = 0.0

    @property
    def rank(self) -> int:
        """This rank."""
        return self.communicator.rank

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.communicator.world

    def elapsed(self) -> float:
        """Seconds since the ranks met."""
        return perf_counter() - self.start

    def together(self, what: str, work: Callable[[], T]) -> list[T]:
        """Every rank's result of ``work``, which must not communicate. Raises ProfileError on every rank if it
        failed on any."""
        failure: str | None = None
        value: T | None = None
        cause: Exception | None = None
        try:
            value = work()
        except Exception as error:
            failure, cause = _reason(self.rank, what, error), error
        with self.guard(what):
            outcomes = self.communicator.exchange((failure, value))
        failures = [f for f, _ in outcomes if f is not None]
        if failures:
            raise ProfileError("; ".join(failures)) from cause
        return [v for _, v in outcomes]

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Turn any failure into a ProfileError that names the rank that failed first."""
        try:
            yield
        except ProfileError:
            raise
        except Exception as error:
            raise ProfileError(self._first_failure(_reason(self.rank, what, error))) from error

    def _first_failure(self, mine: str) -> str:
        if self.store is None:
            return mine
        try:
            return str(self.store.compare_set(_FAILURE, "", mine).decode())
        except Exception:  # the store ended with the rank that held it
            return f"{mine} (another rank may have ended before; it says why)"


def _reason(rank: int, what: str, error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"rank {rank} on {host_name()} failed in {what}: {type(error).__name__}: {text}"


@contextmanager
def joined(wanted: str) -> Iterator[Session]:
    """The session of this process: of the ranks that torchrun started, else of this process alone.

    ``wanted`` is auto, cpu, cuda or cuda:N (without torchrun). Raises ProfileError if the ranks cannot meet, if a
    device is missing, and if some ranks have a GPU and others not.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield Session(LoneCommunicator(), _device(wanted, None), start=perf_counter())
        return
    try:
        store, rank, world = next(iter(rendezvous("env://", timeout=THRESHOLDS.meeting_timeout)))
    except Exception as error:
        raise ProfileError(
            f"rank {os.environ['RANK']} on {host_name()} could not meet the others at "
            f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}: "
            f"{' '.join(str(error).split())}; start all ranks with torchrun, with the same --rdzv-endpoint"
        ) from error
    device = _agreed_device(store, rank, world, wanted)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=THRESHOLDS.meeting_timeout,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        communicator = communicator_for(None, world)
        session = Session(communicator, device, backend, store)
        with session.guard("the first collective"):
            communicator.exchange(None)
        session.start = perf_counter()
        yield session
    finally:
        dist.destroy_process_group()


def _agreed_device(store: Store, rank: int, world: int, wanted: str) -> torch.device:
    """This rank's device, once every rank has told its own through the store."""
    problem = ""
    device = torch.device("cpu")
    try:
        device = _device(wanted, int(os.environ.get("LOCAL_RANK", "0")))
        if device.type == "cuda":
            torch.cuda.set_device(device)
    except ProfileError as error:
        problem = f"rank {rank} on {host_name()}: {error}"
    store.set(f"hetspmd/profile/device/{rank}", problem or device.type)
    answers = [store.get(f"hetspmd/profile/device/{r}").decode() for r in range(world)]
    problems = [f for f in answers if f not in ("cpu", "cuda")]
    if problems:
        raise ProfileError("; ".join(problems))
    if len(set(answers)) > 1:
        with_gpu = [r for r, kind in enumerate(answers) if kind == "cuda"]
        raise ProfileError(
            f"ranks {with_gpu} have a GPU and the others none, and no backend joins them; profile all on the CPU "
            "with --device cpu, or leave ranks out"
        )
    return device


def _device(wanted: str, local_rank: int | None) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and gpus == 0):
        return torch.device("cpu")
    kind, _, index = wanted.partition(":")
    if kind not in ("auto", "cuda") or (index and not index.isdigit()):
        raise ProfileError(f"--device {wanted}: write auto, cpu, cuda or cuda:N")
    if index and local_rank is not None:
        raise ProfileError(
            f"--device {wanted}: under torchrun each rank takes the GPU of its own number; write cuda"
        )
    at = int(index) if index else local_rank or 0
    if at >= gpus:
        raise ProfileError(f"GPU {at} was asked for and there are {gpus}; start as many ranks as GPUs")
    return torch.device("cuda", at)

"""``hetspmd.loader``: a loader that loads on each rank the rows of a batch which that rank uses."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, TypedDict, Unpack
from zlib import crc32

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from hetspmd.errors import OptionError
from hetspmd.run.loader_samples import Collated, Nothing, Request, Samples, Template, moved, seed_of
from hetspmd.run.module import HAP
from hetspmd.run.own_rows import Given

_STATE: Final = 1
"""Version of what ``state_dict`` returns."""


class WorkerKeywords(TypedDict, total=False):
    """Arguments of :func:`loader` that go to torch's DataLoader as they are."""

    num_workers: int
    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    prefetch_factor: int | None
    persistent_workers: bool


def loader(
    dataset: Any,
    hap: HAP,
    *,
    batch_size: int = 1,
    shuffle: bool = False,
    sampler: Iterable[Any] | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    **workers: Unpack[WorkerKeywords],
) -> Loader:
    """A loader for ``HAP(..., batch="own")``: each rank loads the samples of the rows that it uses, no others.

    Every rank makes it, with the same arguments. It goes over the same batches, in the same order, as
    ``torch.utils.data.DataLoader`` with these arguments does on one device. What it yields is what ``collate_fn``
    returns for this rank's samples of a batch, on the device of ``hap``, and ``hap`` is called with it. Which
    rows a rank uses follows from the plan; where a rank needs a whole input (tensor parallelism), it loads all
    samples, unless the input has at most 1 MiB: then its rows are gathered in each step. A rank without rows is
    given a batch of none.

    One sample is loaded once on every rank, to see what ``collate_fn`` makes of it. For each sample torch's,
    numpy's and Python's generators are seeded alike on whatever rank and worker it is loaded.

    Args:
        dataset: A map-style dataset.
        hap: The module that is called with the batches. Copies of it (``copy.deepcopy(hap)``) may be, too.
        batch_size: Samples of the whole batch, of all ranks together.
        shuffle: Draw another order for each epoch, from ``generator``, ``seed`` or else torch's global generator,
            which every rank must have seeded alike.
        sampler: Gives the indices of the samples of all ranks instead.
        seed: ``generator=torch.Generator().manual_seed(seed)``.
        generator: What orders are drawn from; in the same state on every rank.
        drop_last: Leave out a last batch that is smaller. By default it is yielded, and gets a plan of its own.
        collate_fn: Makes a batch of a list of samples; by default torch's. It sees this rank's samples alone, and
            every tensor of its result has a row for each along dim 0, or is the same for any samples.
        workers: The arguments below, which go to torch's DataLoader as they are.
        num_workers: Processes of each rank that load.
        pin_memory: Load into page-locked memory, from which a GPU copies.
        timeout: Seconds that a worker may take for a batch; 0 for as many as it takes.
        worker_init_fn: Called with each worker's number when it begins.
        multiprocessing_context: How workers are started.
        prefetch_factor: Batches that each worker loads ahead.
        persistent_workers: Keep the workers from epoch to epoch.

    Raises:
        OptionError: An argument that cannot be, an iterable-style dataset, or a ``hap`` that takes whole batches.
        CollectiveMismatchError: The ranks make loaders of other lengths, batch sizes or seeds.
    """
    _check(dataset, hap, batch_size, workers)
    if sampler is not None and shuffle:
        raise OptionError("sampler= says the order of the samples, as does shuffle=True; give one of them")
    generator = _generator(seed, generator)
    if sampler is None:
        sampler = RandomSampler(dataset, generator=generator) if shuffle else SequentialSampler(dataset)
    batches = BatchSampler(sampler, batch_size, drop_last)
    return Loader(hap, dataset, batches, generator, collate_fn or default_collate, workers)


def _generator(seed: int | None, generator: torch.Generator | None) -> torch.Generator | None:
    """What orders are drawn from."""
    if seed is None:
        return generator
    if generator is not None:
        raise OptionError("seed= and generator= both say what orders are drawn from; give one of them")
    return torch.Generator().manual_seed(seed)


def _check(dataset: Any, hap: Any, batch_size: Any, workers: Mapping[str, Any]) -> None:
    """Raise OptionError for what no loader can be made of."""
    if not isinstance(hap, HAP):
        raise OptionError(f"loader(dataset, hap) takes a hetspmd.HAP module, not a {type(hap).__name__}")
    if hap.own_rows is None:
        raise OptionError(
            "hetspmd.loader gives each rank its own rows, and this module takes whole batches: make it with "
            'HAP(..., batch="own"), or give every rank the whole batch by a plain DataLoader'
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise OptionError(
            f"{type(dataset).__name__} cannot be asked for single samples: hetspmd.loader takes a map-style "
            "dataset (__getitem__ and __len__). Give every rank the whole batch of an iterable one: "
            'HAP(..., batch="whole") and a plain DataLoader over the same samples on every rank'
        )
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise OptionError(f"batch_size is the number of samples of the whole batch, not {batch_size!r}")
    for name in workers:
        if name not in WorkerKeywords.__annotations__:
            known = ", ".join(sorted(WorkerKeywords.__annotations__))
            raise OptionError(f"hetspmd.loader has no argument {name!r}; to the DataLoader go {known}")


@dataclass
class _Epoch:
    """An epoch that is gone over: its number, where the generators were at its beginning (``random``: torch's
    global one), how many batches were yielded and a digest of their samples."""

    number: int
    generators: list[torch.Tensor]
    random: torch.Tensor
    batches: int = 0
    digest: int = 0
    skip: int = 0
    ordered: deque[tuple[Given, Any, int]] = field(default_factory=deque)
    """The batches that were ordered of the workers, with the first sample of each and the digest up to it."""


class Loader:
    """What :func:`loader` returns: goes over the batches of an epoch, of each this rank's rows.

    ``len(loader)`` is the number of batches of an epoch. ``epoch`` is the number of the epoch that is gone over,
    or was last; it grows by itself with each epoch that begins. ``samples`` is how many samples the whole batch has
    that was yielded last, for means over a dataset.
    """

    def __init__(
        self,
        hap: HAP,
        dataset: Any,
        batches: BatchSampler,
        generator: torch.Generator | None,
        collate: Callable[[list[Any]], Any],
        workers: WorkerKeywords,
    ) -> None:
        assert hap.own_rows is not None
        self.dataset, self.batch_size, self.drop_last = dataset, batches.batch_size, batches.drop_last
        self.sampler, self.generator, self.collate_fn = batches.sampler, generator, collate
        self._hap, self._rows, self._batches = hap, hap.own_rows, batches
        drawn = [generator, getattr(self.sampler, "generator", None)]
        self._generators = list({id(g): g for g in drawn if isinstance(g, torch.Generator)}.values())
        self._origin = self._states()
        self._seed = torch.initial_seed() if generator is None else generator.initial_seed()
        self._number, self._rows.loaders = self._rows.loaders, self._rows.loaders + 1
        self._order = _Order(self)
        try:
            self._data: DataLoader[Any] = DataLoader(
                Samples(dataset),  # type: ignore[arg-type]  # asked for all samples of a batch at once
                batch_sampler=self._order,  # type: ignore[arg-type]  # gives requests to Samples
                collate_fn=Collated(collate),  # type: ignore[arg-type]  # takes what Samples give
                generator=generator,
                **workers,
            )
        except (ValueError, TypeError) as error:
            raise OptionError(f"torch's DataLoader refuses these arguments: {error}") from error
        self._template: Template | None = None
        self._running: _Epoch | None = None
        self._next = 0
        self._resumed: Mapping[str, Any] | None = None
        self.samples = 0
        self.epoch = 0
        hap.meet("loader(...)", self._facts())

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        state, self._resumed = self._resumed, None
        global_state = nullcontext()
        if state is not None:
            self._next = state["epoch"]
            self._set(state["generators"])
            if self.generator is None:
                global_state = _global_state(state["random"])  # type: ignore[assignment]  # both are contexts
        with global_state:
            epoch = self._begin(state)
            given = iter(self._data)
            self._order.newest.ahead()
        if state is not None and epoch.digest != state["digest"]:
            raise OptionError(
                "the sampler gives other samples than when the state was saved, so that the epoch cannot be "
                "gone on with; give the loader the same dataset, sampler and seed as then"
            )
        return self._yielded(epoch, given)

    def set_epoch(self, epoch: int) -> None:
        """Let the next epoch be this one, counted from 0: its order is that of one device in its epoch of this
        number. Loops that begin one epoch after the other need not call it.

        Raises OptionError where orders are drawn from torch's global generator, which cannot be set forward alone.
        """
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
            self._next = epoch
        if epoch == self._next:
            return
        if self._generators:
            self._set(self._origin)
            for _ in range(epoch):
                if self.generator is not None:
                    torch.empty((), dtype=torch.int64).random_(
                        generator=self.generator
                    )  # of the workers' seeds
                deque(self.sampler, maxlen=0)
        elif isinstance(self.sampler, RandomSampler):
            raise OptionError(
                f"the next epoch is {self._next}, and set_epoch({epoch}) needs a generator of the loader's "
                "own; give it seed="
            )
        self._next = epoch

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, the same on every rank and for any cluster: which epoch, how many of its batches
        were yielded, and the state of the generator. Workers may be ahead: what they have loaded does not
        count."""
        running = self._running
        state: dict[str, Any] = {"version": _STATE, **self._sizes()}
        if running is None:
            running = _Epoch(self._next, self._states(), torch.get_rng_state())
        return state | {
            "epoch": running.number,
            "batches": running.batches,
            "digest": running.digest,
            "generators": running.generators,
            "random": running.random,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where ``state_dict()`` was called: after the batch that was yielded last.

        Raises OptionError for the state of a loader with other samples or another batch size, or of no loader.
        """
        wanted = self._sizes()
        if state.get("version") != _STATE or not {"epoch", "batches", "digest", "generators"} <= state.keys():
            raise OptionError(
                "this is no state of a hetspmd.loader of this version; state_dict() returns one"
            )
        for name, value in wanted.items():
            if state[name] != value:
                raise OptionError(
                    f"the state is of a loader with {name} {state[name]}, this one has {value}; an epoch is "
                    "gone on with by a loader with the same arguments"
                )
        if len(state["generators"]) != len(self._generators):
            raise OptionError(
                f"the state has {len(state['generators'])} generators, this loader {len(self._generators)}; "
                "give both seed= or generator=, or none"
            )
        self._resumed, self._running = dict(state), None

    def _begin(self, state: Mapping[str, Any] | None) -> _Epoch:
        epoch = _Epoch(self._next, self._states(), torch.get_rng_state())
        if state is not None:
            epoch.skip = epoch.batches = state["batches"]
        self._next, self.epoch = epoch.number + 1, epoch.number
        self._order.epoch = self._running = epoch
        return epoch

    def _yielded(self, epoch: _Epoch, loaded: Iterator[Any]) -> Iterator[Any]:
        try:
            for batch in loaded:
                given, first, digest = epoch.ordered.popleft()
                if self._template is None:
                    self._template = Template(self.dataset, self.collate_fn, first)
                count = given.share.count(self._hap.rank)
                if isinstance(batch, Nothing):
                    batch = self._template.empty()
                batch = moved(batch, self._hap.device)
                self._rows.give(given, self._template.tensors(batch, count))
                epoch.batches, epoch.digest, self.samples = epoch.batches + 1, digest, given.share.size
                yield batch
        except Exception as error:
            self._hap.everyone.report(error)
            raise
        if self._running is epoch:
            self._running = None

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: Iterable[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _sizes(self) -> dict[str, Any]:
        return {
            "samples": _length(self.sampler),
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
        }

    def _facts(self) -> tuple[str, ...]:
        """What must be the same on every rank."""
        facts = [f"{name}={value}" for name, value in self._sizes().items()]
        facts += [f"a generator in state {crc32(s.numpy().tobytes()):08x}" for s in self._states()]
        return tuple(facts)


class _Order:
    """The batches of a loader as its workers are asked for them: of each the samples of this rank's rows.

    ``epoch`` is the one that is about to be gone over.
    """

    def __init__(self, of: Loader) -> None:
        self._of = of
        self.epoch: _Epoch
        self.newest: _Requests

    def __len__(self) -> int:
        return len(self._of._batches)

    def __iter__(self) -> Iterator[Request]:
        self.newest = _Requests(self._requests(self.epoch))
        return self.newest

    def _requests(self, epoch: _Epoch) -> Iterator[Request]:
        of, digest = self._of, 0
        for number, indices in enumerate(of._batches):
            digest = seed_of(digest, crc32(repr(indices).encode()))
            if number < epoch.skip:
                epoch.digest = digest
                continue
            share = of._rows.share(len(indices), of._number)
            rows = list(share.indices(of._hap.rank))
            given = Given(of._number, epoch.number, number, share, digest)
            epoch.ordered.append((given, indices[0], digest))
            seed = seed_of(of._seed, epoch.number, number)
            yield Request(
                tuple(indices[row] for row in rows), tuple(seed_of(seed, row + 1) for row in rows), seed
            )


class _Requests(Iterator[Request]):
    """An iterator of which the first item can be made before it is asked for."""

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests, self._made = requests, deque[Request]()
        self._begun = False

    def ahead(self) -> None:
        """Make the first item, and draw what the order of the samples is drawn from."""
        if not self._begun:
            self._begun = True
            self._made.extend([request for request in [next(self._requests, None)] if request is not None])

    def __next__(self) -> Request:
        self.ahead()
        return self._made.popleft() if self._made else next(self._requests)


@contextmanager
def _global_state(state: torch.Tensor) -> Iterator[None]:
    """Within the context torch's global generator goes on from ``state``."""
    now = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(now)


def _length(sampler: Any) -> int | None:
    """How many samples a sampler gives; None where it does not say."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None

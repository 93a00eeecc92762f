"""What a loader's workers do: load the samples of a rank's rows, and collate them.

Random numbers: torch, numpy and random are seeded for each sample, by the place of the sample in the epoch, so
that ranks which load the same sample get the same, whoever loads it and with how many workers. In the main
process the generators are afterwards where they were.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils.data import get_worker_info

from hetspmd.dist.digest import join
from hetspmd.errors import OptionError
from hetspmd.run.own_rows import Kind
from hetspmd.trace.compat.trees import flatten, flatten_with_names, unflatten


@dataclass(frozen=True)
class Request:
    """The samples that a rank loads of one batch: their indices and the seed of each; ``seed``: of what
    collates."""

    indices: tuple[Any, ...]
    seeds: tuple[int, ...]
    seed: int


class Nothing:
    """Stands for a batch of no samples of this rank, until it has its shape."""


class Samples:
    """A dataset that is asked for all samples of a request at once."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, request: Request) -> tuple[Request, list[Any]]:
        if not request.indices:
            return request, []
        with own_randomness():
            several = getattr(self.dataset, "__getitems__", None)
            if several is not None:
                seed_all(request.seeds[0])
                return request, several(list(request.indices))
            samples = []
            for index, seed in zip(request.indices, request.seeds, strict=True):
                seed_all(seed)
                samples.append(self.dataset[index])
            return request, samples


class Collated:
    """Collates the samples of a request by the user's function."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self.function = function

    def __call__(self, loaded: tuple[Request, list[Any]]) -> Any:
        request, samples = loaded
        if not request.indices:
            return Nothing()
        with own_randomness():
            seed_all(request.seed)
            return self.function(samples)


def seed_all(seed: int) -> None:
    """Seed the CPU's generators that datasets draw from."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed & (2**63 - 1))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextmanager
def own_randomness() -> Iterator[None]:
    """Within the context the generators are another's: in the main process they are put back at its end."""
    if get_worker_info() is not None:
        yield
        return
    numpy = sys.modules.get("numpy")
    states = random.getstate(), torch.get_rng_state(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if numpy is not None:
            numpy.random.set_state(states[2])


def seed_of(*numbers: int) -> int:
    """A seed that depends on all of these."""
    return join(numbers)


_WHERE: Final = 'make it so in collate_fn, or give every rank the whole batch: HAP(..., batch="whole")'


class Template:
    """What a dataset's batches are: which of their tensors have a row for each sample, and a batch of no samples.

    It is found by collating one sample alone, and twice. Raises OptionError for tensors that are neither rows
    along dim 0 nor the same for any samples.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], index: Any) -> None:
        with own_randomness():
            seed_all(0)
            _, (sample,) = Samples(dataset).__getitems__(Request((index,), (0,), 0))
            again = Samples(dataset).__getitems__(Request((index,), (0,), 0))[1][0]
            self._one = collate([sample])
            self.kinds = _kinds(_tensors(self._one), _tensors(collate([sample, again])))

    def empty(self) -> Any:
        """A batch of no samples."""
        leaves, spec = flatten(self._one)
        names = [name for name, _ in flatten_with_names(self._one)]
        return unflatten(
            [
                leaf[:0].clone() if self.kinds.get(name) == "rows" else leaf
                for name, leaf in zip(names, leaves, strict=True)
            ],
            spec,
        )

    def tensors(self, batch: Any, count: int) -> list[tuple[torch.Tensor, Kind]]:
        """The tensors of a batch of so many samples, and what each is. Raises OptionError where they are not as in
        the template."""
        found = _tensors(batch)
        if found.keys() != self.kinds.keys():
            other = sorted(found.keys() ^ self.kinds.keys())[0]
            raise OptionError(
                f"collate_fn gives other tensors for {count} samples than for one ({other}); {_WHERE}"
            )
        for name, tensor in found.items():
            if self.kinds[name] == "rows" and tensor.shape[:1] != (count,):
                raise OptionError(
                    f"collate_fn gives {name} of shape {list(tensor.shape)} for {count} samples, without a row "
                    f"for each along dim 0; {_WHERE}"
                )
        return [(tensor, self.kinds[name]) for name, tensor in found.items()]


def moved(batch: Any, device: torch.device) -> Any:
    """The batch on a device; itself where it is there."""
    leaves, spec = flatten(batch)
    if all(not isinstance(leaf, torch.Tensor) or leaf.device.type == device.type for leaf in leaves):
        return batch
    return unflatten(
        [
            leaf.to(device, non_blocking=leaf.is_pinned()) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ],
        spec,
    )


def _tensors(batch: Any) -> dict[str, torch.Tensor]:
    return {name: leaf for name, leaf in flatten_with_names(batch) if isinstance(leaf, torch.Tensor)}


def _kinds(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> dict[str, Kind]:
    if one.keys() != two.keys():
        other = sorted(one.keys() ^ two.keys())[0]
        raise OptionError(f"collate_fn gives other tensors for two samples than for one ({other}); {_WHERE}")
    return {name: _kind(name, tuple(one[name].shape), tuple(two[name].shape)) for name in one}


def _kind(name: str, one: Sequence[int], two: Sequence[int]) -> Kind:
    if one == two:
        return "whole"
    if one[:1] == (1,) and two[:1] == (2,) and one[1:] == two[1:]:
        return "rows"
    grown = [dim for dim, (a, b) in enumerate(zip(one, two, strict=False)) if (a, b) == (1, 2)]
    if len(one) == len(two) and grown and grown[0] > 0:
        raise OptionError(
            f"collate_fn gives {name} with the samples along dim {grown[0]} (shape {list(two)} for two); a "
            f"loader of a rank's own rows takes them along dim 0, and the model may transpose; {_WHERE}"
        )
    raise OptionError(
        f"collate_fn gives {name} of shape {list(one)} for one sample and {list(two)} for two; a loader of a "
        f"rank's own rows needs a row for each sample along dim 0, in the order of the samples; {_WHERE}"
    )

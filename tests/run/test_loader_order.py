"""The order of a loader's samples is that of torch's DataLoader, and goes on where it was saved."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from loader_cases import Rows, Training, columns, mlp
from torch.utils.data import DataLoader, RandomSampler

import hetspmd
from hetspmd.errors import OptionError
from hetspmd.run.loader import Loader
from hetspmd.run.module import HAP


@pytest.fixture(scope="module")
def training() -> Training:
    found = mlp()
    found.speeds = (1.0,)
    return found


@pytest.fixture(scope="module")
def hap(training: Training) -> HAP:
    return training.hap()


class Numbers(Rows):
    """Samples that tell their index."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "index": torch.tensor(index)}


def numbers() -> Numbers:
    return Numbers(x=torch.zeros(23, 6))


def order(batches: Any) -> list[list[int]]:
    return [batch["index"].tolist() for batch in batches]


SOURCES: dict[str, dict[str, Any]] = {
    "seed": {"shuffle": True, "seed": 3},
    "generator": {"shuffle": True, "generator": 4},
    "global": {"shuffle": True},
    "sampler": {"sampler": 5},
    "sequential": {},
}


def made(hap: HAP | None, options: dict[str, Any], **others: Any) -> Any:
    """A loader of own rows, or torch's without a module."""
    options = {**options, **others}
    if isinstance(options.get("generator"), int):
        options["generator"] = torch.Generator().manual_seed(options["generator"])
    if "sampler" in options:
        draw = torch.Generator().manual_seed(options["sampler"])
        options["sampler"] = RandomSampler(numbers(), generator=draw)
    if hap is not None:
        return hetspmd.loader(numbers(), hap, batch_size=4, **options)
    if "seed" in options:
        options["generator"] = torch.Generator().manual_seed(options.pop("seed"))
    return DataLoader(numbers(), 4, **options)


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
@pytest.mark.parametrize("source", SOURCES)
def test_it_is_that_of_one_device(hap: HAP, source: str, workers: dict[str, Any]) -> None:
    if workers and source in ("sampler", "sequential"):
        pytest.skip("as without workers")
    torch.manual_seed(1)
    batches = made(None, SOURCES[source], **workers)
    want = [order(batches) for _ in range(3)]
    after = torch.rand(2)
    torch.manual_seed(1)
    batches = made(hap, SOURCES[source], **workers)
    assert [order(batches) for _ in range(3)] == want
    assert torch.equal(torch.rand(2), after), "the global generator is where it would be"
    assert batches.epoch == 2


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("stop", [0, 1, 4, 6])
def test_it_goes_on_where_it_was_saved(hap: HAP, source: str, workers: dict[str, Any], stop: int) -> None:
    """In the second epoch after so many batches of six, then through the third."""
    if workers and stop in (1, 6):
        pytest.skip("as without workers")
    torch.manual_seed(1)
    batches = made(hap, SOURCES[source], **workers)
    order(batches)
    iterator = iter(batches)
    [next(iterator) for _ in range(stop)]
    state, now = batches.state_dict(), torch.get_rng_state()
    want = order(iterator), order(batches), batches.state_dict()
    torch.manual_seed(9)
    again = made(hap, {**SOURCES[source], **({"seed": 8} if source == "seed" else {})}, **workers)
    again.load_state_dict(state)
    torch.set_rng_state(now)
    assert order(again) == want[0]
    assert again.epoch == 1
    assert order(again) == want[1]
    ended = again.state_dict()
    assert [torch.equal(a, b) for a, b in zip(ended["generators"], want[2]["generators"], strict=True)].count(
        False
    ) == 0
    assert (ended["epoch"], ended["batches"]) == (want[2]["epoch"], want[2]["batches"]) == (3, 0)


def test_a_state_is_saved_as_any_other(hap: HAP, tmp_path: Any) -> None:
    batches = made(hap, SOURCES["seed"])
    iterator = iter(batches)
    next(iterator)
    torch.save(batches.state_dict(), tmp_path / "state.pt")
    want = order(iterator)
    again = made(hap, SOURCES["seed"])
    again.load_state_dict(torch.load(tmp_path / "state.pt"))
    iterator = iter(again)
    state = again.state_dict()
    assert state["batches"] == 1
    assert order(iterator) == want


@pytest.mark.parametrize("source", ["seed", "generator", "sampler", "sequential"])
def test_an_epoch_is_set(hap: HAP, source: str) -> None:
    batches = made(hap, SOURCES[source])
    want = [order(batches) for _ in range(4)]
    for epoch in (2, 0, 3, 1):
        batches.set_epoch(epoch)
        assert order(batches) == want[epoch]
        assert batches.epoch == epoch


def test_an_epoch_of_the_global_generator(hap: HAP) -> None:
    batches = made(hap, SOURCES["global"])
    batches.set_epoch(0)
    with pytest.raises(OptionError, match=r"next epoch is 0, and set_epoch\(2\) needs .* give it seed="):
        batches.set_epoch(2)


def test_an_epoch_that_is_broken_off(hap: HAP) -> None:
    one, own = made(None, SOURCES["seed"]), made(hap, SOURCES["seed"])
    for batches in (one, own):
        next(iter(batches))
    assert order(own) == order(one)
    assert own.epoch == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"batch_size": 5}, "batch_size 5, this one has 4"),
        ({"samples": 3}, "samples 3, this one has 23"),
        ({"version": 7}, "no state of a hetspmd.loader"),
        ({"generators": []}, "has 0 generators, this loader 1"),
    ],
)
def test_another_state(hap: HAP, change: dict[str, Any], text: str) -> None:
    batches = made(hap, SOURCES["seed"])
    with pytest.raises(OptionError, match=text):
        batches.load_state_dict({**batches.state_dict(), **change})


def test_a_sampler_that_gives_something_else(hap: HAP) -> None:
    batches = hetspmd.loader(numbers(), hap, batch_size=4, sampler=list(range(20)))
    iterator = iter(batches)
    next(iterator), next(iterator)
    again = hetspmd.loader(numbers(), hap, batch_size=4, sampler=list(reversed(range(20))))
    again.load_state_dict(batches.state_dict())
    with pytest.raises(OptionError, match="other samples than when the state was saved"):
        next(iter(again))


class Drawn(Rows):
    """Draws from all global generators."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        drawn = [float(torch.rand(())), random.random(), float(np.random.rand())]
        return {"index": torch.tensor(index), "drawn": torch.tensor(drawn)}


def test_what_samples_draw(hap: HAP) -> None:
    """The same on any worker, other numbers for each sample and epoch, and the process's own are left alone."""

    def drawn(**workers: Any) -> list[torch.Tensor]:
        batches = hetspmd.loader(
            Drawn(x=torch.zeros(9, 1)), hap, batch_size=4, seed=3, shuffle=True, **workers
        )
        return [batch["drawn"] for _ in range(2) for batch in batches]

    random.seed(2)
    np.random.seed(2)
    torch.manual_seed(2)
    want = drawn()
    left = random.random(), np.random.rand(), float(torch.rand(()))
    torch.testing.assert_close(drawn(num_workers=2), want, rtol=0.0, atol=0.0)
    everything = torch.cat(want)
    assert len({tuple(row.tolist()) for row in everything}) == 18
    random.seed(2)
    np.random.seed(2)
    torch.manual_seed(2)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == left


def test_datasets_that_give_several_samples_at_once(hap: HAP) -> None:
    class Several(Numbers):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[i] for i in indices]

    batches = hetspmd.loader(Several(x=torch.zeros(23, 6)), hap, batch_size=4, shuffle=True, seed=3)
    assert order(batches) == order(made(None, SOURCES["seed"]))


def test_it_says_what_it_is(hap: HAP) -> None:
    batches = hetspmd.loader(columns(23, x=(6,), labels=((), 5)), hap, batch_size=4, drop_last=True)
    assert isinstance(batches, Loader)
    assert (len(batches), batches.batch_size, batches.drop_last, batches.samples) == (5, 4, True, 0)
    next(iter(batches))
    assert batches.samples == 4

"""Loaders that are used wrongly: every rank is told what and how to mend it, in a named error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loader_cases import SEED, WORLD, Rows, Training, columns, data_parallel, loss_of, mlp, padded
from torch.utils.data import DataLoader, IterableDataset, default_collate

import hetspmd
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import BatchMismatchError, CollectiveMismatchError, HetspmdError, OptionError
from hetspmd.run.module import HAP

ODD = 1


def told(
    training: Training, body: Callable[[HAP], Any], kind: type[HetspmdError], **options: Any
) -> list[str]:
    """What every rank is told."""

    def rank(hap: HAP) -> str:
        with pytest.raises(kind) as found:
            body(hap)
        return str(found.value)

    return run_ranks(WORLD, lambda c: rank(training.hap(c, **options)))


def own(training: Training, hap: HAP, **options: Any) -> Any:
    options = {"batch_size": training.batch_size, "shuffle": True, "seed": SEED, **options}
    return hetspmd.loader(options.pop("dataset", training.rows), hap, **options)


def steps(hap: HAP, batches: Any) -> None:
    for batch in batches:
        loss_of(hap(**batch)).backward()


def test_a_plain_loader() -> None:
    training = data_parallel()
    for text in told(training, lambda hap: steps(hap, DataLoader(training.rows, 9)), BatchMismatchError):
        assert "hetspmd.loader(dataset, hap, ...)" in text
        assert "no loader was made" in text


def test_a_plain_loader_beside() -> None:
    """In the middle of an epoch, with as many rows as a rank is given."""
    training = data_parallel()

    def body(hap: HAP) -> None:
        for batch in own(training, hap):
            loss_of(hap(**batch)).backward()
            steps(hap, DataLoader(training.rows, max(1, len(batch["x"]))))

    for text in told(training, body, BatchMismatchError):
        assert "none of these tensors is one of its rows" in text


def test_a_module_that_takes_whole_batches() -> None:
    training = data_parallel()
    for text in told(training, lambda hap: own(training, hap), OptionError, batch="whole"):
        assert 'HAP(..., batch="own")' in text


def test_no_such_batch() -> None:
    with pytest.raises(OptionError, match=r"'whole'.*'own'"):
        mlp().hap(batch="rows")


def test_modules_that_are_not_alike() -> None:
    training = data_parallel()

    def rank(communicator: Any) -> str:
        with pytest.raises(OptionError) as found:
            training.hap(communicator, batch="own" if communicator.rank == ODD else "whole")
        return str(found.value)

    for text in run_ranks(WORLD, rank):
        assert "rank 1 was made with batch='own'" in text


@pytest.mark.parametrize(
    "other",
    [{"batch_size": 8}, {"seed": 6}, {"dataset": columns(22, x=(6,), labels=((), 5))}, {"drop_last": True}],
)
def test_loaders_that_are_not_alike(other: dict[str, Any]) -> None:
    training = data_parallel()

    def body(hap: HAP) -> None:
        own(training, hap, **(other if hap.rank == ODD else {}))

    for text in told(training, body, CollectiveMismatchError):
        assert "the ranks have parted in loader(...)" in text
        assert "rank 1 with" in text


def test_another_order() -> None:
    """Of a sampler, which cannot be compared before."""
    training = data_parallel()

    def body(hap: HAP) -> None:
        order = list(range(23))
        if hap.rank == ODD:
            order[10], order[20] = 20, 10
        steps(hap, own(training, hap, sampler=order, shuffle=False, seed=None))

    for text in told(training, body, BatchMismatchError):
        assert "at step 2 rank 1 was given another list of samples than ranks 0, 2 and 3" in text
        assert "same dataset, batch_size, sampler and seed=" in text


def test_a_batch_that_is_left_out() -> None:
    training = data_parallel()

    def body(hap: HAP) -> None:
        batches = iter(own(training, hap))
        if hap.rank == ODD:
            next(batches)
        steps(hap, batches)

    for text in told(training, body, BatchMismatchError):
        assert "rank 1 was given another list of samples" in text


def test_rows_that_are_missing() -> None:
    training = data_parallel()

    def body(hap: HAP) -> None:
        for batch in own(training, hap):
            cut = {n: t[: max(len(t) - 1, 0)] for n, t in batch.items()} if hap.rank == 0 else batch
            loss_of(hap(**cut)).backward()

    texts = told(training, body, HetspmdError)
    assert all("rank 0: x has the shape [4, 6]" in t and "(rows 0..4)" in t for t in texts), texts


def test_tensors_of_two_batches() -> None:
    training = data_parallel()

    def body(hap: HAP) -> None:
        one, two, *_ = own(training, hap)
        hap(x=one["x"], labels=two["labels"])

    for text in told(training, body, BatchMismatchError):
        assert "of several batches" in text


class Summed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return ((self.scale * x).sum(1) - labels).square().mean()


@pytest.mark.parametrize("count", [9, 7])
def test_a_collate_fn_that_pads_to_the_longest(count: int) -> None:
    """Whether there is a plan for that size or not."""
    rows = columns(23, x=(6,), labels=((), 6))
    rows.columns["labels"][:] = torch.arange(23) % 6
    training = Training(Summed().double(), rows, 9, {"constraints": {"x": "shard(0)"}})

    def body(hap: HAP) -> None:
        steps(hap, own(training, hap, shuffle=False, seed=None, batch_size=count, collate_fn=padded))

    for text in told(training, body, BatchMismatchError):
        assert "Pad to a fixed length" in text


def test_a_collate_fn_of_time_major_batches() -> None:
    training = data_parallel()

    def time_major(samples: list[Any]) -> dict[str, torch.Tensor]:
        batch = default_collate(samples)
        return {**batch, "x": batch["x"].t()}

    for text in told(
        training, lambda hap: steps(hap, own(training, hap, collate_fn=time_major)), OptionError
    ):
        assert "with the samples along dim 1" in text


def test_a_collate_fn_of_several_views() -> None:
    training = data_parallel()

    def views(samples: list[Any]) -> dict[str, torch.Tensor]:
        batch = default_collate(samples)
        return {n: torch.cat([t, t]) for n, t in batch.items()}

    for text in told(training, lambda hap: steps(hap, own(training, hap, collate_fn=views)), OptionError):
        assert "[2, 6] for one sample and [4, 6] for two" in text


def test_a_number_that_a_collate_fn_counts() -> None:
    """It is of this rank's samples alone."""
    rows = columns(23, x=(6,), labels=((), 5))
    example = {"x": rows.columns["x"][:9], "labels": rows.columns["labels"][:9], "count": torch.tensor(9.0)}

    class Counted(Summed):
        def forward(self, x: torch.Tensor, labels: torch.Tensor, count: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # one more
            return ((self.scale * x).sum(1) - labels).square().sum() / count

    training = Training(Counted().double(), rows, 9, {"example": example})

    def counted(samples: list[Any]) -> dict[str, torch.Tensor]:
        return {**default_collate(samples), "count": torch.tensor(float(len(samples)) + 0.0 * SEED)}

    for text in told(
        training, lambda hap: steps(hap, own(training, hap, collate_fn=counted)), BatchMismatchError
    ):
        assert "another count" in text
        assert "no rows of the batch" in text


def test_samples_that_are_not_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks load a row, from a dataset with a generator of its own."""
    from hetspmd.run import row_shares

    monkeypatch.setattr(row_shares, "GATHERED", 0)
    training = mlp()
    training.options["constraints"] = {"x": "replicated"}

    class Noisy(Rows):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            sample = super().__getitem__(index)
            return {**sample, "x": sample["x"] + torch.rand(6, generator=self.generator)}

    def body(hap: HAP) -> None:
        rows = Noisy(**training.rows.columns)
        rows.generator = torch.Generator().manual_seed(hap.rank)  # type: ignore[attr-defined]  # another one on each rank
        steps(hap, own(training, hap, dataset=rows))

    for text in told(training, body, BatchMismatchError):
        assert "of x is not the same on ranks 0, 1" in text
        assert "draw from their global generators" in text


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dataset": Stream()}, "Stream cannot be asked for single samples"),
        ({"batch_size": 0}, "batch_size is the number of samples of the whole batch, not 0"),
        ({"generator": torch.Generator()}, "seed= and generator= both"),
        ({"sampler": [1, 2]}, "sampler= says the order"),
        ({"worker": 2}, "no argument 'worker'"),
        ({"prefetch_factor": 2}, "torch's DataLoader refuses"),
    ],
)
def test_arguments(options: dict[str, Any], text: str) -> None:
    training = mlp()
    training.speeds = (1.0,)
    with pytest.raises(OptionError) as found:
        own(training, training.hap(), **options)
    assert text in str(found.value)


def test_no_module() -> None:
    with pytest.raises(OptionError, match=r"takes a hetspmd\.HAP module, not a Linear"):
        hetspmd.loader(mlp().rows, torch.nn.Linear(2, 2))  # type: ignore[arg-type]  # it is no HAP

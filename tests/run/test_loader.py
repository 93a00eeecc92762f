"""``hetspmd.loader``: every rank loads its own rows, and trains as one device does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from loader_cases import (
    CLOSE,
    SEED,
    TRAININGS,
    WORLD,
    Rows,
    Training,
    check_all,
    columns,
    data_parallel,
    epochs,
    loss_of,
    mlp,
    on_a_rank,
    optimizer_of,
    tensor_parallel,
)
from machine_plans import machine_plan
from small_models import MLP, Case
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

import hetspmd
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.rules.theory import derive
from hetspmd.run import row_shares
from hetspmd.run.module import HAP
from hetspmd.run.row_shares import Share, even_share, own_first, placed
from hetspmd.trace.trace import trace


def on_ranks(training: Training, body: Callable[[HAP], Any], **options: Any) -> list[Any]:
    return run_ranks(WORLD, lambda c: body(training.hap(c, **options)))


def plain(training: Training, **options: Any) -> DataLoader[Any]:
    options = {"shuffle": True, "generator": torch.Generator().manual_seed(SEED), **options}
    return DataLoader(training.rows, training.batch_size, **options)


def own(training: Training, hap: HAP, **options: Any) -> Any:
    options = {"batch_size": training.batch_size, "shuffle": True, "seed": SEED, **options}
    return hetspmd.loader(Rows(**training.rows.columns), hap, **options)


@pytest.mark.parametrize("name", TRAININGS)
def test_it_trains_as_one_device(name: str) -> None:
    training = TRAININGS[name]()
    for got in run_ranks(WORLD, lambda c: on_a_rank(training, c)):
        check_all(got, training)


def test_each_sample_is_loaded_by_one_rank() -> None:
    """But for the one that shows each rank what collate_fn makes."""
    training = data_parallel()
    asked = [r["asked"] for r in run_ranks(WORLD, lambda c: on_a_rank(training, c))]
    once = 2 * len(training.rows) + 2 * WORLD
    assert once <= sum(map(len, asked)) <= once + 1, "an op that reads a row of none finds a valid one"
    assert [len(own) for own in asked] == sorted((len(own) for own in asked), reverse=True)
    assert len(asked[-1]) <= 4, (
        "the last rank has no rows, but in the first batch of 5, of which no plan was known"
    )


def test_a_large_input_that_is_needed_whole_is_loaded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_shares, "GATHERED", 0)
    training = tensor_parallel()
    for got in run_ranks(WORLD, lambda c: on_a_rank(training, c)):
        check_all(got, training)
        if got["rank"] < 3:
            assert len(got["asked"]) > 1.5 * len(training.rows)


def test_rows_that_are_not_needed_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing touches them they hold what comes: here numbers that would be seen."""
    from hetspmd.run import own_rows

    made = own_rows._whole

    def spoiled(leaf: torch.Tensor, kind: Any, share: Share) -> torch.Tensor:
        whole = made(leaf, kind, share)
        return whole if whole.shape == leaf.shape else whole.fill_(4)

    monkeypatch.setattr(own_rows, "_whole", spoiled)
    training = data_parallel()
    for got in run_ranks(WORLD, lambda c: on_a_rank(training, c)):
        check_all(got, training)


@pytest.mark.parametrize("make", [mlp, data_parallel])
def test_evaluation_and_a_copy(make: Callable[[], Training]) -> None:
    """Another dataset, another batch size, no gradients, and a second module with the same loader."""
    training = make()
    held = columns(13, x=(6,), labels=((), 5))

    def evaluated(module: nn.Module, batches: Any, samples: Callable[[Any], int]) -> torch.Tensor:
        module.eval()
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for batch in batches:
                total += loss_of(module(**batch)) * samples(batch)
        module.train()
        return total / len(held)

    def one() -> list[torch.Tensor]:
        model = copy.deepcopy(training.model)
        batches, optimizer = plain(training), optimizer_of("SGD", model)
        results = []
        for _ in range(3):
            results += epochs(model, batches, optimizer, 1)
            results.append(evaluated(model, DataLoader(held, 5), lambda b: len(b["x"])))
        return results

    def rank(hap: HAP) -> list[torch.Tensor]:
        batches, optimizer = own(training, hap), optimizer_of("SGD", hap)
        check_on = hetspmd.loader(held, hap, batch_size=5)
        results = []
        for _ in range(3):
            results += epochs(hap, batches, optimizer, 1)
            results.append(evaluated(hap, check_on, lambda _: check_on.samples))
        twin = evaluated(copy.deepcopy(hap), check_on, lambda _: check_on.samples)
        torch.testing.assert_close(twin, results[-1], **CLOSE)
        return results

    want = one()
    for got in on_ranks(training, rank):
        torch.testing.assert_close(got, want, **CLOSE)


def test_another_batch_size_than_that_of_the_example() -> None:
    training = data_parallel()
    want = epochs(m := copy.deepcopy(training.model), DataLoader(training.rows, 6), optimizer_of("SGD", m))
    for got in on_ranks(
        training,
        lambda hap: epochs(hap, own(training, hap, batch_size=6, shuffle=False), optimizer_of("SGD", hap)),
    ):
        torch.testing.assert_close(got, want, **CLOSE)


class Masked(nn.Module):
    """Attention with a mask over positions and a number, which are no rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(
        self, inputs: dict[str, torch.Tensor], mask: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        x = self.project(inputs["x"])
        scores = (x @ x.transpose(1, 2) * scale).masked_fill(~mask, float("-inf"))
        return ((scores.softmax(-1) @ x).mean((1, 2)) - inputs["y"]).square().mean()


@dataclass
class Pair:
    """What a collate_fn returns."""

    inputs: dict[str, torch.Tensor]
    mask: torch.Tensor


@pytest.mark.parametrize("length", [2, 3, 5, 9])
@pytest.mark.parametrize("collated", [True, False])
def test_inputs_that_are_no_rows_are_whole(length: int, collated: bool) -> None:
    """Whether the collate_fn makes them or the loop; with as many positions as a rank has rows, or the batch."""
    torch.manual_seed(0)
    rows = columns(11, x=(length, 4), y=())
    mask, scale = torch.ones(length, length).tril().bool(), torch.tensor(0.5, dtype=torch.float64)
    example = {"inputs": {n: c[:9] for n, c in rows.columns.items()}, "mask": mask, "scale": scale}
    training = Training(Masked().double(), rows, 9, {"example": example, "constraints": {"*x*": "shard(0)"}})

    def collate(samples: list[Any]) -> Pair:
        made = torch.ones(length, length).tril().bool()
        return Pair(torch.utils.data.default_collate(samples), made)

    def trained(module: nn.Module, batches: Any) -> list[torch.Tensor]:
        optimizer, losses = optimizer_of("SGD", module), []
        for _ in range(3):
            for pair in batches:
                optimizer.zero_grad()
                loss = (
                    module(pair.inputs, pair.mask if collated else mask, scale)
                    if module is not None
                    else None
                )
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        return losses

    def keywords(hap: HAP) -> nn.Module:
        class Called(nn.Module):
            def forward(self, inputs: Any, mask: Any, scale: Any) -> torch.Tensor:
                return hap(inputs=inputs, mask=mask, scale=scale)

            def parameters(self, recurse: bool = True) -> Any:
                return hap.parameters(recurse)

        return Called()

    want = trained(copy.deepcopy(training.model), plain(training, collate_fn=collate))
    for got in on_ranks(training, lambda hap: trained(keywords(hap), own(training, hap, collate_fn=collate))):
        torch.testing.assert_close(got, want, **CLOSE)


def test_tensors_that_are_changed_after_loading() -> None:
    """As long as one of them is the loader's own, or a view of it."""
    training = data_parallel()

    def trained(module: nn.Module, batches: Any) -> list[torch.Tensor]:
        losses, optimizer = [], optimizer_of("AdamW", module)
        for _ in range(2):
            for batch in batches:
                optimizer.zero_grad()
                loss = loss_of(module(x=batch["x"] * 2 - 1, labels=batch["labels"].view(-1, 1)[:, 0]))
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        return losses

    want = trained(copy.deepcopy(training.model), plain(training))
    for got in on_ranks(training, lambda hap: trained(hap, own(training, hap))):
        torch.testing.assert_close(got, want, **CLOSE)


def test_batches_that_are_kept() -> None:
    """The tensors tell their batch, not the order of the calls."""
    training = data_parallel()

    def losses(module: nn.Module, batches: Any) -> list[torch.Tensor]:
        kept = list(batches)
        return [loss_of(module(**batch)).detach() for batch in (*reversed(kept), kept[1])]

    want = losses(copy.deepcopy(training.model), plain(training))
    for got in on_ranks(training, lambda hap: losses(hap, own(training, hap))):
        torch.testing.assert_close(got, want, **CLOSE)


def test_a_plan_that_changes_between_loading_and_the_call() -> None:
    """Batches of one plan's rows are used with another one's, in turns."""
    training = mlp()

    def losses(module: nn.Module, batches: Any) -> list[torch.Tensor]:
        found = []
        for number, batch in enumerate([*batches, *batches]):
            module.train(number % 2 == 0)
            with torch.set_grad_enabled(number % 3 != 0):
                found.append(loss_of(module(**batch)).detach())
        return found

    want = losses(copy.deepcopy(training.model), plain(training))
    for got in on_ranks(training, lambda hap: losses(hap, own(training, hap))):
        torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", ["random", "weighted", "list"])
def test_samplers(kind: str, drop_last: bool) -> None:
    training = data_parallel()

    def sampler() -> Any:
        draw = torch.Generator().manual_seed(9)
        if kind == "random":
            return RandomSampler(training.rows, replacement=True, num_samples=20, generator=draw)
        if kind == "weighted":
            return WeightedRandomSampler([1.0, *[2.0] * 22], 20, generator=draw)
        return [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]

    options = {"sampler": sampler(), "drop_last": drop_last, "shuffle": False, "generator": None}
    model = copy.deepcopy(training.model)
    want = epochs(model, plain(training, **options), optimizer_of("SGD", model))

    def rank(hap: HAP) -> list[torch.Tensor]:
        batches = own(training, hap, sampler=sampler(), drop_last=drop_last, shuffle=False, seed=None)
        assert len(batches) == (2 if drop_last else 3)
        return epochs(hap, batches, optimizer_of("SGD", hap))

    for got in on_ranks(training, rank):
        torch.testing.assert_close(got, want, **CLOSE)


def test_a_single_device() -> None:
    training = mlp()
    training.speeds = (1.0,)
    check_all(on_a_rank(training), training)


def test_shares() -> None:
    share = Share(5, (((0, 2), (4, 5)), (), ((1, 4),)))
    assert [list(share.indices(r)) for r in range(3)] == [[0, 1, 4], [], [1, 2, 3]]
    assert share.owners() == [((0, 2), (4, 5)), (), ((2, 4),)]
    assert share.shared() == [(1, [0, 2])]
    assert share.covers([((4, 5),), (), ((2, 3),)])
    assert not share.covers([((3, 4),), (), ()])
    whole = torch.arange(10.0).view(5, 2)
    parts = [whole[torch.tensor(list(share.indices(r)), dtype=torch.int64)] for r in range(3)]
    sent = [own_first(part, share, rank) for rank, part in enumerate(parts)]
    together = torch.cat([part for part, _, _ in sent])
    assert [len(part) for part, _, _ in sent] == sent[0][1] == [3, 0, 2]
    torch.testing.assert_close(together[sent[1][2]], whole)
    at = torch.zeros(5, 2)
    placed(parts[2], share, 2, at, filled=True)
    torch.testing.assert_close(at, whole[torch.tensor([1, 1, 2, 3, 1])])


def test_even_parts_have_every_row_once() -> None:
    plan = data_parallel().options["plan"]
    for size in (1, 3, 4, 10):
        share = even_share(plan, size)
        assert sorted(row for rank in range(WORLD) for row in share.indices(rank)) == list(range(size))


class Tempered(MLP):
    """A number of the model changes what it computes."""

    temperature = 1.0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(x * self.temperature, labels)


def test_a_number_of_the_model_that_changes() -> None:
    """So that the step is traced anew in the middle of an epoch."""
    torch.manual_seed(0)
    training = Training(Tempered().double(), columns(23, x=(6,), labels=((), 5)), 9)

    def losses(module: nn.Module, model: Any, batches: Any) -> list[torch.Tensor]:
        found = []
        for number, batch in enumerate([*batches, *batches]):
            model.temperature = 1.0 + number // 2
            found.append(loss_of(module(**batch)).detach())
        return found

    model = copy.deepcopy(training.model)
    want = losses(model, model, plain(training))
    for got in on_ranks(training, lambda hap: losses(hap, hap.module, own(training, hap))):
        torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("seed", range(3))
def test_accelerators_of_machines(seed: int) -> None:
    training = mlp()
    theory = derive(trace(training.model, (), training.example))
    plan = machine_plan(Case(training.model, training.example, theory), (2, 1, 1), seed)

    def rank(communicator: Any) -> list[torch.Tensor]:
        model, options = copy.deepcopy(training.model), {"batch": "own", "check_plan": False}
        hap = HAP(model, plan.cluster, plan=plan, process_group=communicator, **options)
        batches = own(training, hap, drop_last=True)
        return epochs(hap, batches, optimizer_of("SGD", hap))

    model = copy.deepcopy(training.model)
    want = epochs(model, plain(training, drop_last=True), optimizer_of("SGD", model))
    for got in run_ranks(WORLD, rank):
        torch.testing.assert_close(got, want, **CLOSE)


def test_a_batch_of_transformers() -> None:
    """BatchEncoding, also on a rank without rows."""
    from transformers import BatchEncoding

    training = data_parallel()

    def collate(samples: list[Any]) -> Any:
        return BatchEncoding(torch.utils.data.default_collate(samples))

    model = copy.deepcopy(training.model)
    want = epochs(model, plain(training, collate_fn=collate), optimizer_of("SGD", model))

    def rank(hap: HAP) -> list[torch.Tensor]:
        batches = own(training, hap, collate_fn=collate)
        assert all(isinstance(batch, BatchEncoding) for batch in batches)
        return epochs(hap, own(training, hap, collate_fn=collate), optimizer_of("SGD", hap))

    for got in on_ranks(training, rank):
        torch.testing.assert_close(got, want, **CLOSE)

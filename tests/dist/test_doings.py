"""What a rank alone does to its shards, of which nobody has a copy, is named at the next step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from divided import X, net, on_four, train

from hetspmd.errors import ParameterMismatchError
from hetspmd.run.module import HAP

STATE = net().state_dict()


def steps(
    hap: HAP, optimizer: Any, *, each: Callable[[int], Any] = lambda step: None, zero: bool = True
) -> None:
    for step in range(4):
        if zero:
            optimizer.zero_grad()
        hap(X).backward()
        optimizer.step()
        each(step)


def rate(hap: HAP) -> None:
    steps(hap, torch.optim.SGD(hap.parameters(), lr=0.2 if hap.rank == 1 else 0.1))


def schedule(hap: HAP) -> None:
    optimizer = torch.optim.AdamW(hap.parameters(), lr=0.1)
    following = torch.optim.lr_scheduler.StepLR(optimizer, 1 if hap.rank == 2 else 2)
    steps(hap, optimizer, each=lambda step: following.step())


def betas(hap: HAP) -> None:
    steps(hap, torch.optim.Adam(hap.parameters(), betas=(0.9, 0.99 if hap.rank == 3 else 0.999)))


def decay_of_a_group(hap: HAP) -> None:
    whole, rest = [p for p in hap.parameters() if p.dim() < 2], [p for p in hap.parameters() if p.dim() == 2]
    groups = [
        {"params": rest, "weight_decay": 0.1 if hap.rank else 0.2},
        {"params": whole, "weight_decay": 0.0},
    ]
    steps(hap, torch.optim.AdamW(groups, lr=0.1))


def zero_grad(hap: HAP) -> None:
    steps(hap, torch.optim.SGD(hap.parameters(), lr=0.1), zero=hap.rank != 1)


def a_step(hap: HAP) -> None:
    optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        hap(X).backward()
        if hap.rank != 2 or step != 1:
            optimizer.step()


def loads(hap: HAP) -> None:
    if hap.rank == 2:
        hap.load_state_dict({name: value * 0 for name, value in STATE.items()})
    hap(X)


def other_states(hap: HAP) -> None:
    hap.load_state_dict({name: value + hap.rank // 3 for name, value in STATE.items()})
    hap(X)


def another_part(hap: HAP) -> None:
    name = "a.weight" if hap.rank else "b.0.weight"
    hap.load_state_dict({name: STATE[name]}, strict=False)
    hap(X)


def into_the_model(hap: HAP) -> None:
    if hap.rank == 1:
        hap.module.a.load_state_dict({n: STATE[f"a.{n}"] * 0.5 for n in ("weight", "bias")})
    hap(X)


ALONE: dict[Callable[[HAP], None], str] = {
    rate: r"before step 2 .*\(ranks 0, 2 and 3: a step of SGD with lr 0\.1; rank 1: a step of SGD with lr 0\.2\)",
    schedule: r"before step 3 .*rank 2: a step of AdamW with lr 0\.01",
    betas: r"before step 2 .*rank 3: a step of Adam with betas\[1\] 0\.99\)",
    decay_of_a_group: r"before step 2 .*rank 0: a step of AdamW with weight_decay of group 0 0\.2\)",
    zero_grad: r"before step 3 .*rank 1: a backward that adds to gradients that are there\)",
    a_step: r"before step 3 .*rank 2: nothing \(more\)\)",
    loads: r"before step 1 .*ranks 0, 1 and 3: nothing \(more\); rank 2: load_state_dict\)",
    other_states: r"before step 1 .*rank 3: load_state_dict with a\.bias [0-9a-f]{16}, a\.weight [0-9a-f]{16}",
    into_the_model: r"before step 1 .*ranks 0, 2 and 3: nothing \(more\); rank 1: load_state_dict\)",
    another_part: r"before step 1 .*rank 0: load_state_dict with b\.0\.weight",
}


@pytest.mark.parametrize("alone", ALONE, ids=lambda alone: alone.__name__)
def test_it_is_named_on_every_rank(alone: Callable[[HAP], None]) -> None:
    def body(hap: HAP) -> str:
        with pytest.raises(ParameterMismatchError, match=ALONE[alone]) as error:
            alone(hap)
        return str(error.value)

    first, *others = on_four(body)
    assert all(text == first for text in others)
    assert "Go on from the last checkpoint" in first


def test_what_all_ranks_do_is_not() -> None:
    """Accumulation, schedules, two optimizers, a state dict, evaluation; also without looking."""

    def body(hap: HAP) -> float:
        optimizer = torch.optim.AdamW(hap.parameters(), lr=0.1, foreach=hap.rank > 1)
        other = torch.optim.SGD(hap.module.b.parameters(), lr=0.1)
        following = torch.optim.lr_scheduler.CosineAnnealingLR(other, 4)
        for step in range(4):
            hap(X).backward()
            if step % 2:
                for each in (optimizer, other):
                    each.step()
                    each.zero_grad()
                following.step()
        hap.load_state_dict({name: value * 2 for name, value in STATE.items()})
        hap.module.load_state_dict(STATE)
        hap.eval()
        with torch.no_grad():
            return float(hap(X))

    want = net().eval()(X).item()
    for found in on_four(body):
        assert found == pytest.approx(want, rel=1e-10)


def test_nothing_is_compared_where_that_is_turned_off() -> None:
    def body(hap: HAP) -> list[float]:
        return train(hap, optimizer=torch.optim.SGD(hap.parameters(), lr=0.1 + 0.1 * hap.rank))

    assert len(on_four(body, check_batches=False)) == 4

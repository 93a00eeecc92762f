"""Ranks that clip, or scale, something else than the others are told so, every one of them."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from ranks import loss_of
from small_models import Case, case
from small_plans import random_plan
from torch import nn

import hetspmd
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import CollectiveMismatchError
from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP

WORLD, ODD = 3, 1
Act = Callable[[HAP, HAP, bool], Any]


def scaled(model: Any, scale: float, parameters: Any = None) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(torch.optim.SGD(parameters or model.parameters(), lr=0.1))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@cache
def planned() -> tuple[Case, Plan]:
    c = case("mlp")
    plan = random_plan(c, WORLD, 2)
    _ = plan.theory, plan.digest
    return c, plan


def told_of(act: Act, steps: int = 3) -> list[str]:
    """What every rank is told when ``act(hap, other, odd)`` is called in each step; one of the ranks is odd."""
    c, plan = planned()
    models = [[copy.deepcopy(c.model) for _ in range(2)] for _ in range(WORLD)]

    def rank(communicator: Communicator) -> str:
        made = [HAP(m, plan.cluster, plan=plan, process_group=communicator, check_plan=False)
                for m in models[communicator.rank]]  # fmt: skip
        try:
            for _ in range(steps):
                for hap in made:
                    hap.zero_grad()
                    loss_of(hap(**c.batch)).backward()
                act(made[0], made[1], communicator.rank == ODD)
            made[0].full_state_dict()
        except CollectiveMismatchError as error:
            return str(error)
        return ""

    return run_ranks(WORLD, rank)


PARTING: dict[str, tuple[Act, str]] = {
    "another module": (
        lambda a, b, odd: nn.utils.clip_grad_norm_((b if odd else a).parameters(), 1.0),
        r"ranks 0 and 2 in the norm of .* of HAP module 0, rank 1 in the norm of .* of HAP module 1",
    ),
    "another module by hetspmd": (
        lambda a, b, odd: hetspmd.get_total_norm(b if odd else a), r"rank 1 in the norm of .* of HAP module 1",
    ),
    "another module scaled": (
        lambda a, b, odd: scaled(b if odd else a, 2.0), r"rank 1 in a GradScaler's .* of HAP module 1",
    ),
    "norm_type": (
        lambda a, b, odd: nn.utils.clip_grad_norm_(a.parameters(), 1.0, math.inf if odd else 2),
        r"parted in the norm.* of HAP module 0: ranks 0 and 2 with norm_type=2; rank 1 with norm_type=inf\.",
    ),
    "max_norm": (
        lambda a, b, odd: hetspmd.clip_grad_norm_(a, 0.1 if odd else 0.2),
        r"ranks 0 and 2 with max_norm=0\.2; rank 1 with max_norm=0\.1\.",
    ),
    "clips or only looks": (
        lambda a, b, odd: hetspmd.get_total_norm(a) if odd else hetspmd.clip_grad_norm_(a, 1.0),
        r"ranks 0 and 2 with max_norm=1; rank 1 with none of these",
    ),
    "error_if_nonfinite": (
        lambda a, b, odd: nn.utils.clip_grad_norm_(a.parameters(), 1.0, error_if_nonfinite=odd),
        r"rank 1 with error_if_nonfinite=True",
    ),
    "fewer parameters": (
        lambda a, b, odd: nn.utils.clip_grad_norm_(list(a.parameters())[odd:], 1.0),
        r"ranks 0 and 2 with scale; rank 1 with none of these",
    ),
    "gradients": (
        lambda a, b, odd: nn.utils.get_total_norm(gradients(a)[odd:]),
        r"ranks 0 and 2 with a\.weight; rank 1 with none of these",
    ),
    "other tensors": (
        lambda a, b, odd: nn.utils.get_total_norm([gradients(a)[0], *[torch.ones(2)] * odd]),
        r"rank 1 with tensors of no HAP module: 1",
    ),
    "fewer parameters scaled": (
        lambda a, b, odd: scaled(a, 2.0, list(a.parameters())[odd:]),
        r"parted in a GradScaler.*ranks 0 and 2 with scale; rank 1 with none",
    ),
    "scale": (
        lambda a, b, odd: scaled(a, 4.0 if odd else 2.0), r"another scale.*2 on rank 0, 4 on rank 1, 2 on rank 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(PARTING))
def test_another_norm_or_scale_on_one_rank(name: str) -> None:
    act, message = PARTING[name]
    found = told_of(act)
    assert len(set(found)) == 1
    assert found[0]
    assert re.search(message, found[0]), found[0]


@pytest.mark.parametrize("steps", [1, 3])
def test_the_same_in_other_words(steps: int) -> None:
    """Another order of the parameters, another function, a rounding of ``max_norm``; nothing is wrong."""

    def act(a: HAP, b: HAP, odd: bool) -> None:
        listed = list(a.parameters())
        clip = hetspmd.clip_grad_norm_ if odd else nn.utils.clip_grad_norm_
        clip(listed[::-1] if odd else listed, 1.0 + 1e-12 * odd, 2 if odd else 2.0)
        scaled(b, 2.0)

    assert told_of(act, steps) == [""] * WORLD

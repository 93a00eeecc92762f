"""Hooks on sharded gradients see what one device's see, or are told that they do not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import CLOSE, loss_of, on_ranks
from small_models import Case, case
from small_plans import cluster, random_plan
from torch import nn

import hetspmd
from hetspmd.errors import GradientError, GradientHookWarning
from hetspmd.optimize.compiler import plan_for
from hetspmd.placement import is_sharded
from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP
from hetspmd.search.constraints import Constraints

MASK = torch.rand(10, 6, dtype=torch.float64)
HOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "scaled": lambda g: g * 0.5,
    "normalised": lambda g: g / g.norm(),
    "centred": lambda g: g - g.mean(0, keepdim=True),
    "masked": lambda g: g * MASK,
    "in place": lambda g: g.mul_(g.abs().max()),
    "looked at": lambda g: None,
}


def divided(c: Case) -> Plan:
    """A plan that stores both matrices in shards."""
    plans = (random_plan(c, 3, seed) for seed in range(80))
    return next(p for p in plans if all(is_sharded(p.parameter_layout()[f"{n}.weight"][0]) for n in "ab"))


def gradients(module: nn.Module, batch: dict[str, Any]) -> None:
    """Of two forwards at once: a hook is called once, with their sum."""
    module.zero_grad()
    (loss_of(module(**batch)) + 2 * loss_of(module(**batch))).backward()


def test_hooks_are_given_whole_gradients() -> None:
    c = case("mlp")

    def run(module: nn.Module, model: nn.Module, whole: Callable[[], Any]) -> dict[str, Any]:
        found = {}
        for name, hook in HOOKS.items():
            seen: list[torch.Tensor] = []

            def both(g: torch.Tensor, hook: Any = hook, seen: list[torch.Tensor] = seen) -> Any:
                seen.append(g.clone())
                return hook(g)

            handles = [model.get_parameter("a.weight").register_hook(both)]
            handles.append(
                model.get_parameter("b.weight").register_hook(lambda g: g.sum() * torch.ones_like(g))
            )
            gradients(module, c.batch)
            found[name] = whole(), seen
            for handle in handles:
                handle.remove()
            gradients(module, c.batch)
            assert len(seen) == 1, "a removed hook is gone"
        return found

    model = copy.deepcopy(c.model)
    want = run(
        model, model, lambda: {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    )

    with pytest.warns(GradientHookWarning, match=r"on [ab]\.weight .* is given the whole gradient"):
        results = on_ranks(c, divided(c), lambda hap: run(hap, hap.module, hap.full_gradients))
    for found in results:
        torch.testing.assert_close(found, want, **CLOSE)


def test_asked_for_by_name_and_by_parameter_also_on_idle_ranks() -> None:
    c = case("mlp")
    model = copy.deepcopy(c.model)
    model.get_parameter("a.weight").register_hook(HOOKS["normalised"])
    model.get_parameter("b.bias").register_hook(HOOKS["normalised"])
    gradients(model, c.batch)
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    def body(hap: HAP) -> dict[str, torch.Tensor]:
        hetspmd.on_full_gradient(hap, "a.weight", HOOKS["normalised"])
        hetspmd.on_full_gradient(hap, hap.module.get_parameter("b.bias"), HOOKS["normalised"])
        hetspmd.on_full_gradient(hap, "b.weight", HOOKS["scaled"]).remove()
        with pytest.raises(GradientError, match="has no parameter 'c'"):
            hetspmd.on_full_gradient(hap, "c", HOOKS["scaled"])
        gradients(hap, c.batch)
        return hap.full_gradients()

    lone = plan_for(c.theory, cluster(1, 3), Constraints({}), (1.0,), active=(1,))
    idle = plan_for(c.theory, cluster(3, 1, 2), Constraints({}), (0.6, 0.4), active=(0, 2))
    for plan in (divided(c), idle, lone):
        for found in on_ranks(c, plan, body):
            torch.testing.assert_close(found, want, **CLOSE)


def test_a_hook_that_knows_shards_and_a_hook_after_accumulation_are_told() -> None:
    c = case("mlp")

    def body(hap: HAP) -> None:
        hetspmd.on_full_gradient(hap, "a.weight", lambda g: g[:1])
        with pytest.raises(
            GradientError, match=r"whole gradient, of \[10, 6\], and returned one of \[1, 6\]"
        ):
            gradients(hap, c.batch)

    def after(hap: HAP) -> list[tuple[int, ...]]:
        seen: list[tuple[int, ...]] = []
        weight = hap.module.get_parameter("a.weight")
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(tuple(p.shape)))
        gradients(hap, c.batch)
        gradients(hap, c.batch)
        return seen

    on_ranks(c, divided(c), body)
    with pytest.warns(
        GradientHookWarning, match=r"hetspmd\.on_full_gradient\(hap, 'a\.weight', hook\)"
    ) as told:
        assert all(len(seen) == 2 for seen in on_ranks(c, divided(c), after))
    assert len(told) == 3, "each rank is told once"


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of torch 2.11, on one device
def test_hooks_on_the_backward_of_modules_are_part_of_the_plan_and_told() -> None:
    """What they return is traced; what else they do is not done again."""
    c = case("mlp")

    def hooked(model: nn.Module) -> nn.Module:
        model.get_submodule("a").register_full_backward_pre_hook(lambda m, g: (g[0] * 0.5,))
        return model

    single = hooked(copy.deepcopy(c.model))
    loss_of(single(**c.batch)).backward()
    with pytest.warns(GradientHookWarning, match="of module a is called once, when the step is traced"):
        hap = HAP(hooked(copy.deepcopy(c.model)), cluster(1), example=c.batch)
    hap.run_lowered()
    loss_of(hap(**c.batch)).backward()
    found = hap.full_gradients()
    for name, parameter in single.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, **CLOSE)

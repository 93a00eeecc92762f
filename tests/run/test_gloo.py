"""Real processes over gloo: one launch that runs everything, compared with the simulation.

In float32 the two differ in the order in which a sum over ranks is taken (gloo reduces around a ring, the
simulation in rank order), so they agree to rounding and not bit for bit.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gloo_worker import idle_plans, mixed_plans, plans, train, worker

from hetspmd.dist.simulated_world import run_ranks
from hetspmd.verify.comparison import largest_error
from processes import launched_once

WORLD = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank."""
    folder = launched_once(tmp_path_factory, "gloo", worker, WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def test_collectives_by_brute_force(results: list[dict[str, Any]]) -> None:
    counts = {r["collectives"] for r in results}
    assert len(counts) == 1
    assert counts.pop() > 100


def test_training_equals_the_simulation(results: list[dict[str, Any]]) -> None:
    for index, (c, plan) in enumerate(plans(WORLD)):
        models = [copy.deepcopy(c.model) for _ in range(WORLD)]
        _ = plan.theory, plan.digest
        simulated = run_ranks(
            WORLD,
            lambda comm, m=models, c=c, plan=plan: train(m[comm.rank], c, plan, comm),
        )
        for rank in range(WORLD):
            got, want = results[rank]["training"][index], simulated[rank]
            torch.testing.assert_close(got["losses"], want["losses"], rtol=1e-6, atol=0.0)
            assert largest_error(got["gradients"], want["gradients"], 1e-6)[0] <= 1e-6
            assert largest_error(got["final"], want["final"], 1e-6)[0] <= 1e-6


def test_mixed_precision_accumulated_and_clipped(results: list[dict[str, Any]]) -> None:
    """As the single device does it, to bfloat16's rounding; the norm is the same number on every rank."""
    for index, (c, _) in enumerate(mixed_plans(WORLD)):
        model = copy.deepcopy(c.model)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                output = model(**c.batch)
            loss = (
                output["loss"]
                if isinstance(output, dict)
                else output[0]
                if isinstance(output, tuple)
                else output
            )
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        for result in results:
            got = result["mixed"][index]
            assert torch.equal(got["norm"], results[0]["mixed"][index]["norm"])
            torch.testing.assert_close(got["loss"], loss.detach(), rtol=0.02, atol=0.0)
            torch.testing.assert_close(got["norm"], norm, rtol=0.03, atol=0.0)
            peak = max(float(g.abs().max()) for g in want.values())
            assert set(got["gradients"]) == set(want)
            for key, value in got["gradients"].items():
                torch.testing.assert_close(value, want[key], rtol=0.0, atol=0.03 * peak)


def test_errors_are_the_same_on_every_rank(results: list[dict[str, Any]]) -> None:
    for r in results:
        world_size, plan, trace = r["errors"]
        assert f"cluster has 2 devices, the process group {WORLD}" in world_size
        assert "on ranks [0]" in plan
        assert f"on ranks {list(range(1, WORLD))}" in plan
        assert "cannot be traced" in trace
    assert len({tuple(r["errors"]) for r in results}) == 1


def test_rank_zero_compiles_for_all(results: list[dict[str, Any]]) -> None:
    digests = {r["compiled"][0] for r in results}
    losses = {r["compiled"][1].item() for r in results}
    assert len(digests) == 1
    assert len(losses) == 1


def test_idle_ranks(results: list[dict[str, Any]]) -> None:
    """Rank 1 alone, ranks 0 and 3, then all: each from the other's state, as one device would go on."""
    c, made = idle_plans()
    model = copy.deepcopy(c.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, plan in enumerate(made):
        model.train()
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(**c.batch)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
        model.eval()
        with torch.no_grad():
            losses.append(model(**c.batch).item())
        for rank, result in enumerate(results):
            found = result["idle"][index]
            assert found["losses"] == pytest.approx(losses, rel=1e-10)
            assert (found["elements"] == 0) == (rank in plan.idle)
            for key, value in model.state_dict().items():
                torch.testing.assert_close(found["state"][key], value, rtol=1e-9, atol=1e-11)

"""Ranks that were given unlike options are told so before anything is planned."""

from __future__ import annotations

import copy
import re
from collections import UserDict
from functools import cache
from typing import Any

import numpy as np
import pytest
from divided import CLUSTER, X, net
from loader_cases import WORLD, Training, data_parallel, mlp

import hetspmd
from hetspmd.cluster.cluster import Cluster
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import OptionError
from hetspmd.optimize.compile_options import CompileOptions
from hetspmd.placement import REPLICATE
from hetspmd.plan.plan import Plan
from hetspmd.run import module
from hetspmd.run.module import HAP
from hetspmd.run.run_options import RunOptions
from hetspmd.run.same_options import OWN, check_same_options

ODD = 1
OTHERS = "ranks 0, 2 and 3"


def told(training: Training, usual: dict[str, Any], odd: dict[str, Any]) -> set[str]:
    """What all ranks are told, of which one is given other options."""

    def rank(communicator: Communicator) -> str:
        with pytest.raises(OptionError) as found:
            training.hap(communicator, **(odd if communicator.rank == ODD else usual))
        return str(found.value)

    return set(run_ranks(WORLD, rank))


UNLIKE: dict[str, tuple[Any, Any]] = {
    "micro_batches": (1, 2),
    "zero": (None, 3),
    "recompute": ("checkpoints", "all"),
    "segments": ("auto", 2),
    "machines": ("auto", "flat"),
    "constraints": (None, {"*": "replicated"}),
    "strict": (False, True),
    "loss_only": (False, True),
    "time_limit": (600.0, 5.0),
    "host_randomness": ("refuse", "trace_each_step"),
    "gather_outputs": (False, True),
    "gather_state": (False, True),
    "sync_module_states": (True, False),
    "check_batches": (True, False),
    "check_plan": (True, False),
    "batch": ("whole", "own"),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_one_rank_is_given_another_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("nothing is planned")

    monkeypatch.setattr(module, "first_plan", never)
    first, other = UNLIKE[name]
    (text,) = told(mlp(), {name: first}, {name: other})
    assert text == f"rank 1 was made with {name}={other!r}, {OTHERS} with {name}={first!r}; " + (
        "give every rank the same"
    )


def test_every_option_is_compared_or_each_ranks_own() -> None:
    options = {*RunOptions.__dataclass_fields__, *CompileOptions.__dataclass_fields__}
    assert options == UNLIKE.keys() | OWN
    assert not UNLIKE.keys() & OWN


def test_another_cluster_or_a_plan_on_one_rank_alone() -> None:
    training = data_parallel()
    plan = training.options["plan"]

    def texts(make: Any) -> set[str]:
        def rank(communicator: Communicator) -> str:
            with pytest.raises(OptionError) as found:
                make(communicator)
            return str(found.value)

        return set(run_ranks(WORLD, rank))

    def with_plan(communicator: Communicator) -> None:
        given = {"plan": plan} if communicator.rank == ODD else {"example": {"x": None}}
        HAP(copy.deepcopy(training.model), plan.cluster, process_group=communicator, **given)

    (text,) = texts(with_plan)
    assert text == f"rank 1 was made with plan=..., {OTHERS} with plan=None; give every rank the same"

    def on_another(communicator: Communicator) -> None:
        faster = [dict(d, flops=d["flops"] * (2 if communicator.rank == ODD else 1)) for d in DEVICES]
        HAP(
            copy.deepcopy(training.model), {"devices": faster, "network": NETWORK}, process_group=communicator
        )

    (text,) = texts(on_another)
    assert text == f"rank 1 was made with another cluster than {OTHERS}; give every rank the same"


DEVICES = [{"name": f"d{i}", "flops": s * 1e8, "memory_bandwidth": 1e9} for i, s in enumerate((2, 1, 1, 1))]
NETWORK = {"bandwidth": 1e9, "latency": 1e-6}


def test_the_same_written_otherwise() -> None:
    """Orders of mappings and their classes do not count, nor do the options that are each rank's own."""
    cluster = Cluster.load({"devices": DEVICES, "network": NETWORK})
    both = {"a.weight": REPLICATE, "b.0.weight": REPLICATE}
    written: list[Any] = [both, dict(reversed(both.items())), UserDict(both), both]

    def rank(communicator: Communicator) -> None:
        run = RunOptions(timeout=5.0 + communicator.rank, compile=communicator.rank == ODD)
        constraints: Any = written[communicator.rank]
        loss = [None, 0, "loss", 1][communicator.rank]
        compilation = CompileOptions(constraints=constraints, loss=loss)
        check_same_options(communicator, cluster, run, compilation, with_plan=False)

    run_ranks(WORLD, rank)
    written[:] = [{}, None, {}, None]
    run_ranks(WORLD, rank)


def test_a_long_value_is_shortened() -> None:
    many = {f"layers.{n}.weight": "replicated" for n in range(50)}
    (text,) = told(mlp(), {}, {"constraints": many})
    assert "constraints={'layers.0.weight': " in text
    assert len(text) < 250


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *(
            (name, value, f"{name} is True or False, not {value!r}")
            for name in (
                "gather_outputs",
                "gather_state",
                "sync_module_states",
                "check_batches",
                "check_plan",
            )
            for value in ("no", 1, None)
        ),
        *((name, "no", f"{name} is True or False, not 'no'") for name in ("strict", "loss_only")),
        *(
            ("timeout", value, f"timeout is a positive number of seconds, not {value!r}")
            for value in ("60", None, [1], True, 0, -1.0, float("nan"))
        ),
        *(
            ("time_limit", value, f"time_limit={value!r}: give seconds")
            for value in ("60", None, [1], True, -1.0, float("nan"))
        ),
        (
            "compile",
            "inductor",
            "compile is True, False or a dict of torch.compile's arguments, not 'inductor'",
        ),
    ],
)
def test_a_value_that_cannot_be(name: str, value: object, said: str) -> None:
    with pytest.raises(OptionError) as found:
        mlp().hap(**{name: value})
    assert str(found.value).startswith(said)


def test_numbers_of_seconds() -> None:
    assert CompileOptions(time_limit=float("inf")).time_limit == float("inf")
    assert CompileOptions(time_limit=np.float32(5)).time_limit == 5.0
    assert RunOptions(timeout=30).timeout == 30


@cache
def settled_plan() -> Plan:
    plan = hetspmd.compile(net(), (X,), CLUSTER, constraints={"b.0.weight": "replicated"})
    _ = plan.theory, plan.digest
    return plan


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"zero": 3}, "zero=3 with a plan, which says how parameters are stored"),
        ({"segments": 2}, "segments=2 with a plan, which says how many segments there are"),
        ({"constraints": {"b.0.weight": "shard(0)"}}, r"constraints=.*shard\(0\).* made with .*replicated"),
        ({"constraints": {"b.0.weight": "replicated"}}, ""),
        ({"constraints": {"b.0.weight": REPLICATE}}, ""),
        ({"constraints": {}}, ""),
        ({"segments": "auto"}, ""),
    ],
)
def test_what_a_plan_has_settled_is_not_asked_for_beside_it(asked: dict[str, Any], said: str) -> None:
    models = [net() for _ in range(4)]
    plan = settled_plan()

    def body(communicator: Communicator) -> str:
        try:
            HAP(models[communicator.rank], CLUSTER, plan=plan, process_group=communicator, **asked)
        except OptionError as error:
            return str(error)
        return ""

    texts = set(run_ranks(4, body))
    assert len(texts) == 1
    (text,) = texts
    assert bool(text) == bool(said)
    assert re.search(said, text)

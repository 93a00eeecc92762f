"""Measured steps of models in a cluster file: what is read, refused, and kept of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Device, Network
from hetspmd.cluster.step_curves import ModelSteps, StepCurve, StepPoint
from hetspmd.codec.records import DamageError, decode, encode
from hetspmd.errors import ClusterError

IDENTITY = "0123456789abcdef" * 4
POINTS = (
    StepPoint(1, 0.1, 0.09, 0.12, 9, 1100, 1000),
    StepPoint(4, 0.2, 0.2, 0.2, 3, 2200, 2000),
)
FAST = StepCurve((0, 2), 4096, POINTS, (5, 2500))
SLOW = StepCurve((1,), 2048, POINTS[:1], (2, 1400))
STEPS = ModelSteps(IDENTITY, "bert.py", (("x", 0, 1), ("mask", 1, 2)), "adamw", (FAST, SLOW))


def cluster(*steps: ModelSteps) -> Cluster:
    devices = tuple(Device(name, {"default": 1e9}, memory=4096.0) for name in "aba")
    return Cluster(devices, Network(1e9), steps=steps)


def document(**changes: Any) -> dict[str, Any]:
    """A cluster file whose first curve (or model, or the part itself) has other entries."""
    found = cluster(STEPS).to_dict()
    (model,) = found["measured"]["steps"]
    for key, value in changes.items():
        of = model["curves"][0] if key in model["curves"][0] or key == "over" else model
        of[key] = value
    return found


def test_the_file_reads_back() -> None:
    own = cluster(STEPS)
    assert Cluster.from_text(own.to_text()) == own
    assert Cluster.load(document()) == own
    assert "measured steps of bert.py" in str(own)
    assert own.steps[0].by_rank(3) == (FAST, SLOW, FAST)
    assert (FAST.limit, SLOW.limit, StepCurve((0,), 1, (), (1, 9)).limit) == (4, 1, 0)


def test_old_files_and_plans_stay_as_they_are() -> None:
    own = cluster()
    assert own.steps == ()
    assert "steps" not in own.to_text()
    tree = encode(own)
    assert "steps" not in tree, "plans of clusters without curves have the text that they had"
    assert decode(tree, Cluster) == own
    with pytest.raises(DamageError, match="steps is written where it is left out"):
        decode({**tree, "steps": []}, Cluster)
    with_steps = encode(cluster(STEPS))
    assert decode(with_steps, Cluster) == cluster(STEPS)
    assert {k: v for k, v in with_steps.items() if k != "steps"} == tree


def test_a_part_of_the_devices_has_its_part_of_the_curves() -> None:
    own = cluster(STEPS)
    assert own.part((2, 1)).steps[0].curves == (replace(FAST, ranks=(0,)), replace(SLOW, ranks=(1,)))
    assert own.part((0, 2)).steps[0].by_rank(2) == (replace(FAST, ranks=(0, 1)),) * 2
    alone = cluster(replace(STEPS, curves=(SLOW,)))
    assert alone.part((0, 2)).steps == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "xyz"}, "'xyz' is no identity; write 64 hexadecimal digits"),
        ({"name": ""}, "name is nothing"),
        ({"rows": []}, "name at least one dim with rows"),
        ({"rows": [["x", 0, 1], ["x", 0, 1]]}, "each once"),
        ({"rows": [["x", 0]]}, "a dim with rows has 2 entries; write input, dim, elements of a row"),
        ({"rows": [["x", 99, 1]]}, "x has no rows of 1 elements in dim 99"),
        ({"rows": "x"}, "rows is 'x'; write a list"),
        ({"optimizer": "lion"}, "optimizer is 'lion'; allowed are adamw, momentum, sgd"),
        ({"ranks": []}, "list them in order"),
        ({"ranks": [2, 0]}, r"ranks are \[2, 0\]; list them in order"),
        ({"ranks": [0, 3]}, "on rank 3; the cluster has 3 devices"),
        ({"ranks": [0, 1]}, "on rank 1 stand twice; remove one curve"),
        ({"memory": 0}, "memory is 0; write a whole number from 1"),
        ({"memory": 1e300}, "it must be positive"),
        ({"over": [4, 2500]}, "4 rows of 2500 bytes did not fit, and 4 rows did"),
        ({"over": [5]}, "over has 1 numbers; write rows, counted bytes"),
        ({"points": []}, ""),
        ({"points": [[1, 0.1, 0.09, 0.12, 9, 1100]]}, "a point has 6 numbers; write rows, seconds, low, high"),
        ({"points": [[2, 1, 1, 1, 3, 9, 9], [1, 1, 1, 1, 3, 9, 9]]}, "1 rows after 2; points ascend"),
        ({"points": [[1, 1, 2, 3, 3, 9, 9]]}, "the seconds of 1 rows are not within their interval"),
        ({"points": [[1, -1, 2, 3, 3, 9, 9]]}, "seconds is -1; write a positive number"),
        ({"points": [[1.5, 1, 1, 1, 3, 9, 9]]}, "rows is 1.5; write a whole number from 1"),
        ({"points": [[1, 1, 1, 1, 3, 0, 9]]}, "peak is 0; write a whole number from 1"),
        ({"curve": 3}, "unknown key 'curve'"),
    ],
)  # fmt: skip
def test_bad_curves_are_refused_by_place(changes: dict[str, Any], message: str) -> None:
    if not message:
        assert Cluster.load(document(**changes)).steps[0].curves[0].limit == 0
        return
    with pytest.raises(ClusterError, match=message) as caught:
        Cluster.load(document(**changes))
    assert "['measured']['steps']" in str(caught.value)


def test_the_same_model_twice_is_refused() -> None:
    twice = document()
    twice["measured"]["steps"] *= 2
    with pytest.raises(ClusterError, match=r"measured steps of the model 'bert\.py' stand twice"):
        Cluster.load(twice)
    with pytest.raises(ClusterError, match="there are no points and no over; profile again"):
        cluster(replace(STEPS, curves=(StepCurve((0,), 9, ()),)))

"""What the compiler decides of real models on unlike clusters, as a text that renaming does not change.

A change of structure must leave every plan as it was. ``python tests/plan_net.py --write`` records the plans of
:data:`MODELS` on :data:`CLUSTERS` in ``tests/fixtures/plan_net``, one file a model; ``test_plan_net.py`` compiles
them again and compares; ``--check`` does so by hand, and says every difference.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

TESTS = Path(__file__).resolve().parent
for _folder in (TESTS, TESTS / "run", TESTS.parent / "benches"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

from hetspmd.cluster.cluster import Cluster  # noqa: E402  # as above
from hetspmd.errors import HetspmdError  # noqa: E402  # as above
from hetspmd.optimize.compile_options import CompileOptions  # noqa: E402  # the folders first
from hetspmd.optimize.compiler import compile_plan  # noqa: E402  # the folders first
from hetspmd.plan.plan import Plan  # noqa: E402  # as above
from hetspmd.program.program import Compute, Program  # noqa: E402  # as above
from hetspmd.trace.graph import Graph  # noqa: E402  # as above
from hetspmd.trace.trace import split_example, trace  # noqa: E402  # as above

FOLDER: Final = TESTS / "fixtures" / "plan_net"
DIGITS: Final = 10
"""Of predicted seconds: the last ones differ between processors."""


@dataclass(frozen=True)
class Point:
    """A cluster for models of a size, and how it is compiled for; ``memory``: the part of the fullest device's need
    that each device has."""

    devices: Callable[[float], Cluster]
    options: Mapping[str, Any]
    memory: float | None = None


def _flat(*speeds: float, bandwidth: float = 1e10, latency: float = 1e-6) -> Callable[[float], Cluster]:
    """Devices of 10 GFLOP/s times speed and size."""
    return lambda size: Cluster.load({
        "devices": [
            {"name": f"d{i}", "flops": s * 1e10 * size, "memory_bandwidth": s * 1e10 * size, "memory": 1e12,
             "launch": 1e-6}
            for i, s in enumerate(speeds)
        ],
        "network": {"bandwidth": bandwidth * size, "latency": latency},
    })  # fmt: skip


def _boards(_size: float) -> Cluster:
    return Cluster.load(TESTS.parent / "examples" / "clusters" / "four-boards.yaml")


def _nodes(size: float) -> Cluster:
    inside = {"bandwidth": 1e10 * size, "latency": 1e-6}
    kind = {"memory": 1e12, "memory_bandwidth": 1e10 * size, "launch": 1e-6, "inside": inside}
    return Cluster.load({
        "devices": [
            {"name": "large", "flops": 4e10 * size, "accelerators": 4, **kind},
            {"name": "small", "flops": 1e10 * size, "accelerators": 2, **kind},
        ],
        "network": {"bandwidth": 1e9 * size, "latency": 1e-5},
    })  # fmt: skip


CLUSTERS: Final[dict[str, Point]] = {
    "one": Point(_flat(1), {}),
    "two": Point(_flat(2, 1), {}),
    "four": Point(_flat(4, 2, 1, 1), {}),
    "four, slow network": Point(_flat(4, 2, 1, 1, bandwidth=1e8, latency=1e-4), {}),
    "eight alike": Point(_flat(*[1.0] * 8, bandwidth=1e9), {}),
    "boards": Point(_boards, {}),
    "machines": Point(_nodes, {"machines": "virtual"}),
    "little memory": Point(_flat(4, 2, 1, 1, bandwidth=1e9), {}, memory=0.6),
    "three segments": Point(_flat(4, 2, 1, 1, bandwidth=1e9), {"segments": 3}),
    "gathers ahead": Point(_flat(2, 1, bandwidth=2e8, latency=1e-5), {}),
}


def _trust(name: str) -> Callable[[], Any]:
    def make() -> Any:
        from trust.models import build

        return (*build(name), None)

    return make


def _zoo(name: str) -> Callable[[], Any]:
    def make() -> Any:
        import zoo

        return zoo.build(name)

    return make


SMALL: Final = frozenset({"lstm", "dlrm", "t5"})
"""Models with a hundredth of the others' work, for devices and links a hundredth as fast."""

MODELS: Final[dict[str, Callable[[], tuple[nn.Module, Any, Any]]]] = {
    **{name: _trust(name) for name in ("VGG19", "ResNet-50", "ViT", "BERT", "GPT-2", "Llama", "BERT-MoE")},
    **{name: _zoo(name) for name in sorted(SMALL)},
}


def graph_of(name: str) -> Graph:
    """The traced step of a model."""
    torch.manual_seed(0)
    model, example, loss = MODELS[name]()
    args, kwargs = split_example(example)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trace(model, args, kwargs, loss=loss)


def recorded(name: str, graph: Graph, point: Point) -> dict[str, Any]:
    """The plan of a model's step on a cluster, or the error, as JSON."""
    devices = point.devices(0.01 if name in SMALL else 1.0)
    try:
        if point.memory is not None:
            need = max(_plan(graph, devices, point).cost.memory_bytes)
            devices = replace(
                devices, devices=tuple(replace(d, memory=int(point.memory * need)) for d in devices.devices)
            )
        return _text(_plan(graph, devices, point))
    except HetspmdError as error:
        return {"error": type(error).__name__}


def _plan(graph: Graph, devices: Cluster, point: Point) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile_plan(nn.Module(), (), {}, devices, CompileOptions(**point.options), traced=graph)


def _text(plan: Plan) -> dict[str, Any]:
    cost = plan.cost
    found: dict[str, Any] = {
        "program": _program(plan.program, plan.schedule.prefetch_distance),
        "active": plan.active,
        "lengths": plan.lengths.units,
        "seconds": list(map(_rounded, (cost.step_seconds, cost.compute_seconds, cost.communication_seconds))),
        "bytes": cost.memory_bytes,
        "stages": cost.stages,
        "stop": plan.search.stop_reason,
        "baselines": {name: _rounded(seconds) for name, seconds in sorted(plan.baselines.items())},
        "over memory": sorted(plan.over_memory),
    }  # fmt: skip
    if plan.inside is not None:
        found["inside"] = _program(plan.inside.program, 1)
        found["bytes inside"] = plan.inside.memory_bytes
    return json.loads(json.dumps(found))


def _rounded(seconds: float) -> str:
    return f"{seconds:.{DIGITS}g}"


def _program(program: Program, prefetch_distance: int) -> list[str]:
    return [*_lines(program), f"ahead {prefetch_distance}"]


def _lines(program: Program) -> Iterator[str]:
    """A line a step; placements by number: 0 replicated, 1 partial, 2 + d sharded along dim d."""
    for step in program.steps:
        if isinstance(step, Compute):
            row = step.row
            factor = "" if row.factor is None else f" by {row.factor}"
            yield f"compute {step.instruction}: {_numbers(row.pre)} to {_numbers(row.post)}{factor}"
        else:
            yield f"{step.kind} {step.tensor}: {step.source} to {step.target}"
    for what, results in (
        ("output", program.outputs),
        ("gradient", program.gradients),
        ("buffer", program.buffers),
    ):
        yield from (f"{what} {result.tensor}: {result.form}" for result in results)


def _numbers(forms: tuple[int, ...]) -> str:
    return " ".join(map(str, forms)) or "nothing"


def stored(name: str) -> Any:
    """What was recorded of a model: the version of torch, and the plans by cluster."""
    return json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))


def differences(name: str, clusters: Iterable[str] = CLUSTERS) -> list[str]:
    """What is otherwise than it was recorded: the part, the model and the cluster of each."""
    plans, graph, found = stored(name)["plans"], graph_of(name), []
    for cluster in clusters:
        now, before = recorded(name, graph, CLUSTERS[cluster]), plans[cluster]
        parts = [part for part in {**before, **now} if now.get(part) != before.get(part)]
        found += [f"{part} of {name} on {cluster}" for part in parts]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the plans anew")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--check", action="store_true", help="say what is otherwise than it was recorded")
    options = parser.parse_args()
    if options.check:
        found = [line for name in options.names or MODELS for line in differences(name)]
        print("\n".join(found) or "all plans are as they were recorded")
        return bool(found)
    for name in options.names or MODELS:
        graph = graph_of(name)
        plans = {}
        for cluster, point in CLUSTERS.items():
            plans[cluster] = recorded(name, graph, point)
            said = plans[cluster].get("error") or plans[cluster]["seconds"][0]
            print(f"{name} on {cluster}: {said}", flush=True)
        if options.write:
            FOLDER.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"torch": torch.__version__, "plans": plans}, indent=0)
            (FOLDER / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())

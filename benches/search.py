"""The search against HiGHS on the same problems: real joint graphs, several clusters.

    python benches/search.py [MODEL ...] [--full]

Prints, for each problem, its size, the seconds of the core and of HiGHS's integer program (one thread each) and
their ratio. Models are the small ones of tests/zoo.py; ``--full`` takes the real sizes of examples/ and leaves
HiGHS out where it needs more than its limit. Times depend on the machine; ratios less so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benches")]

import zoo  # noqa: E402  # after the path is set
from hetspmd import _core  # noqa: E402  # the path first
from hetspmd.balance.lengths import lengths_for  # noqa: E402  # the path first
from hetspmd.cost.cluster import Cluster  # noqa: E402  # the path first
from hetspmd.cost.model import CostModel  # noqa: E402  # the path first
from hetspmd.rules.theory import Theory, derive  # noqa: E402  # the path first
from hetspmd.synth.constraints import Constraints  # noqa: E402  # the path first
from hetspmd.synth.search import Searcher  # noqa: E402  # the path first
from hetspmd.synth.space import search_space  # noqa: E402  # the path first
from hetspmd.trace.trace import split_example, trace  # noqa: E402  # the path first
from integer_program import optimum  # noqa: E402  # the path first

CLUSTERS = {
    "8 equal": (1.0,) * 8,
    "4:2:1:1": (4.0, 2.0, 1.0, 1.0),
    "2 V100 + 6 P100": (1.6,) * 2 + (1.0,) * 6,
    "1 + 15 slow": (8.0,) + (1.0,) * 15,
}
SMALL = ("bert", "gpt2", "llama", "vit", "vgg19", "resnet50")
FULL = ("bert", "gpt2", "llama", "vit", "vgg19", "resnet50", "bert_moe")
HIGHS_LIMIT = 120.0


def cluster(speeds: tuple[float, ...], *, full: bool) -> Cluster:
    """Devices of the given relative speeds; slow ones on a fast network for small models."""
    scale = 7.5e12 if full else 2e8
    devices: list[dict[str, Any]] = [
        {"name": f"d{i}", "flops": s * scale, "memory_bandwidth": s * scale / 14}
        for i, s in enumerate(speeds)
    ]
    network = {"bandwidth": 1.3e9, "latency": 5e-5} if full else {"bandwidth": 2e9, "latency": 1e-6}
    return Cluster.load({"devices": devices, "network": network})


def theory_of(name: str, *, full: bool) -> Theory:
    """The background theory of a model's training step."""
    loss = None
    if full:
        spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model, example = module.build()
    else:
        model, example, loss = zoo.build(name)
    args, kwargs = split_example(example)
    return derive(trace(model, args, kwargs, loss=loss))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--full", action="store_true", help="real sizes, on the meta device")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, one used")
    print(f"{'model':<10} {'cluster':<16} {'values':>7} {'core s':>8} {'gap':>9} {'HiGHS s':>8} {'ratio':>7}")
    for name in options.models or (FULL if options.full else SMALL):
        theory = theory_of(name, full=options.full)
        for title, speeds in CLUSTERS.items():
            lengths = lengths_for(theory.axes, tuple(s / sum(speeds) for s in speeds))
            model = CostModel(theory, cluster(speeds, full=options.full))
            problem = Searcher(search_space(theory, Constraints())).problem(model, lengths)
            found = json.loads(
                _core.solve(problem, time_limit=600.0, max_expansions=100_000, memory_limit=2**32)
            )
            try:
                cost, seconds = optimum(problem, time_limit=HIGHS_LIMIT)
                same = "" if abs(found["cost"] - cost) <= 1e-9 * cost else f"  HiGHS finds {cost}"
                other = f"{seconds:8.2f} {seconds / found['seconds']:6.0f}x{same}"
            except RuntimeError as error:
                other = f"       -       - ({error})"
            print(
                f"{name:<10} {title:<16} {found['values']:>7} {found['seconds']:>8.3f} {found['gap']:>9.2g} "
                f"{other}",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""What the search costs: CPU seconds, memory and gaps, on joint graphs of real models and on several clusters.

    python benches/search.py [--quick] [--only PART ...] [--models NAME ...] [--write FILE]

Parts:

    models   models of real size x clusters: preparation, the first search, a second one at slightly other ratios
    depth    Llama-3-8B's shape with more layers
    devices  4 to 256 devices
    speeds   devices of random speeds: the spread of times
    highs    small models: the core against HiGHS's integer program of the same problem

Preparation is what is done once for a model: the space, the structure of its prices, the core's model. A search is
the prices at the ratios, the core, and the program in order. All is CPU time of this process on one thread, so that
other load matters less, and the least of several runs. Memory is the growth of the process's resident set at its
peak, over preparation and both searches. ``--write`` replaces the tables of a file between its marks.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import json
import os
import platform
import random
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from hetspmd import _core
from hetspmd.cost.model import CostModel
from hetspmd.program.lengths import Lengths, lengths_for
from hetspmd.rules.theory import Theory
from hetspmd.search.constraints import Constraints
from hetspmd.search.search import Limits, Searcher, SearchResult
from hetspmd.search.space import search_space
from integer_program import optimum
from real_models import CLUSTERS, REAL, SMALL, cluster, llama_of, real, small

MARKS = ("<!-- search tables -->\n", "<!-- end of search tables -->")
CORE = {"time_limit": 600.0, "max_expansions": 100_000, "memory_limit": 2**32}
HIGHS_LIMIT = 120.0
MIXED = (4.0, 2.0, 1.0, 1.0)


@dataclass(frozen=True)
class Measured:
    """Least CPU seconds of several runs, peak memory in bytes, and what the searches found."""

    preparation: float
    first: float
    second: float
    memory: int
    found: SearchResult
    again: SearchResult

    @property
    def gap(self) -> str:
        """The larger gap of the two searches."""
        gap = max(self.found.gap, self.again.gap)
        return "0" if gap == 0.0 else f"{gap:.1e}"


def shares(speeds: Sequence[float]) -> tuple[float, ...]:
    """Ratios proportional to speeds."""
    return tuple(s / sum(speeds) for s in speeds)


def nearby(speeds: Sequence[float]) -> tuple[float, ...]:
    """Speeds that differ by a few per cent, as ratios do from one round of the alternation to the next."""
    return tuple(s * (1.03 if i % 2 else 0.98) for i, s in enumerate(speeds))


def measure(theory: Theory, speeds: Sequence[float], repeat: int) -> Measured:
    """Preparation and two searches at proportional and nearby ratios, ``repeat`` times."""
    devices = cluster(speeds)
    warm_up(theory)
    at: list[Lengths] = [lengths_for(theory.axes, shares(s)) for s in (speeds, nearby(speeds))]
    seconds: list[list[float]] = []
    memory = 0
    for _ in range(repeat):
        start = resident()
        clock = [time.process_time()]
        searcher = Searcher(search_space(theory, Constraints()))
        _ = searcher.pricing, searcher.core
        clock.append(time.process_time())
        costs = CostModel(theory, devices)
        found = searcher.search(costs, at[0], Limits())
        clock.append(time.process_time())
        again = searcher.search(costs, at[1], Limits(), start=found)
        clock.append(time.process_time())
        seconds.append([b - a for a, b in pairwise(clock)])
        memory = max(memory, peak() - start)
    preparation, first, second = (min(column) for column in zip(*seconds, strict=True))
    return Measured(preparation, first, second, memory, found, again)


def warm_up(theory: Theory) -> float:
    """CPU seconds of what a theory makes once and keeps: rows of triples, axes, FLOPs and bytes."""
    started = time.process_time()
    search_space(theory, Constraints())
    CostModel(theory, cluster((1.0,)))
    return time.process_time() - started


def resident() -> int:
    """Resident bytes, with the allocator's free pages given back; the peak counts from here."""
    name = ctypes.util.find_library("c")
    if name is not None and hasattr(ctypes.CDLL(name), "malloc_trim"):
        ctypes.CDLL(name).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return _peak_of_process()


def peak() -> int:
    """The most bytes resident since :func:`resident`; of the process's life where the system cannot tell."""
    try:
        return _status("VmHWM")
    except OSError:
        return _peak_of_process()


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def _peak_of_process() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> Iterator[str]:
    """Lines of a Markdown table, as the rows come; the first column is text."""
    yield "| " + " | ".join(head) + " |"
    yield "|---|" + "--:|" * (len(head) - 1)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def models(names: Sequence[str], quick: bool) -> Iterator[str]:
    """Models of real size on all clusters."""

    def steps() -> Iterator[Sequence[str]]:
        for name in names:
            started = time.process_time()
            theory = real(name)
            traced = time.process_time() - started
            yield name, f"{traced:.1f}", f"{warm_up(theory):.2f}"

    def rows() -> Iterator[Sequence[str]]:
        for name in names:
            theory = real(name)
            for title, speeds in CLUSTERS.items():
                m = measure(theory, speeds, 1 if quick else 3)
                yield (
                    f"{name}, {title}", f"{len(theory.graph.instructions):,}", f"{m.found.values:,}",
                    f"{m.preparation:.2f}", f"{m.first:.3f}", f"{m.second:.3f}",
                    f"{m.second / (m.preparation + m.first):.2f}", m.gap, f"{m.found.expansions:,}",
                    f"{m.memory / 2**20:.0f}",
                )  # fmt: skip

    yield from table(("before the search", "trace s", "rules s"), steps())
    yield from table(
        ("model, cluster", "instructions", "values", "preparation s", "first s", "second s",
         "second / (preparation + first)", "gap", "expansions", "memory MiB"), rows(),
    )  # fmt: skip


def depth(quick: bool) -> Iterator[str]:
    """Llama-3-8B's shape with 24 layers and more, on eight unlike devices."""
    base: list[float] = []

    def rows() -> Iterator[Sequence[str]]:
        for layers in (24, 48) if quick else (24, 48, 96):
            m = measure(llama_of(layers), MIXED * 2, 1 if quick else 3)
            whole = m.preparation + m.first
            base.append(whole)
            count = f"{len(llama_of(layers).graph.instructions):,}"
            yield (
                f"{layers} layers", count, f"{m.preparation:.2f}", f"{m.first:.3f}", f"{m.second:.3f}",
                f"{whole / base[0]:.1f}", m.gap,
            )  # fmt: skip

    yield from table(
        ("Llama-3-8B's shape", "instructions", "preparation s", "first s", "second s", "times 24 layers", "gap"),
        rows(),
    )  # fmt: skip


def devices(quick: bool) -> Iterator[str]:
    """GPT-2 and Llama on more and more devices of three speeds."""
    base: dict[str, float] = {}

    def rows() -> Iterator[Sequence[str]]:
        for name in ("GPT-2",) if quick else ("GPT-2", "Llama-3-8B, 32 layers"):
            for count in (4, 64) if quick else (4, 8, 16, 32, 64, 128, 256):
                m = measure(real(name), MIXED * (count // 4), 1 if quick else 3)
                base.setdefault(name, m.first)
                yield (
                    f"{name}, {count} devices", f"{m.preparation:.2f}", f"{m.first:.3f}", f"{m.second:.3f}",
                    f"{m.first / base[name]:.1f}", f"{count // 4}", m.gap,
                )  # fmt: skip

    yield from table(
        ("model", "preparation s", "first s", "second s", "first, times 4 devices'", "devices, times 4", "gap"),
        rows(),
    )  # fmt: skip


def speeds(quick: bool) -> Iterator[str]:
    """Eight devices whose speeds are drawn from a range of sixteen times (each logarithmically even)."""

    def rows() -> Iterator[Sequence[str]]:
        for name in ("GPT-2", "VGG19") if quick else ("BERT base", "GPT-2", "VGG19", "ResNet-50"):
            rng = random.Random(0)
            drawn = [[16 ** rng.random() for _ in range(8)] for _ in range(3 if quick else 8)]
            all_ = [measure(real(name), one, 1 if quick or name == "ResNet-50" else 2) for one in drawn]
            seconds = sorted(m.first for m in all_)
            gap = max(max(m.found.gap, m.again.gap) for m in all_)
            closed = sum(m.found.gap == 0.0 for m in all_)
            yield (
                name, str(len(drawn)), f"{seconds[0]:.3f}", f"{seconds[len(seconds) // 2]:.3f}",
                f"{seconds[-1]:.3f}", f"{closed} of {len(drawn)}", "0" if gap == 0.0 else f"{gap:.1e}",
            )  # fmt: skip

    yield from table(
        ("eight devices of random speeds", "draws", "least s", "median s", "most s", "closed", "largest gap"),
        rows(),
    )


def highs(quick: bool) -> Iterator[str]:
    """Small models: the core (preparation and search, from the problem text) and HiGHS (its solver alone)."""

    def rows() -> Iterator[Sequence[str]]:
        for name in SMALL[:2] if quick else SMALL:
            theory = small(name)
            searcher = Searcher(search_space(theory, Constraints()))
            for title, relative in CLUSTERS.items():
                costs = CostModel(theory, cluster(relative, real=False))
                text = searcher.problem(costs, lengths_for(theory.axes, shares(relative)))
                seconds = []
                for _ in range(3):
                    started = time.process_time()
                    found = json.loads(_core.solve(text, **CORE))  # type: ignore[arg-type]  # one dict of limits
                    seconds.append(time.process_time() - started)
                gap = "0" if found["gap"] == 0.0 else f"{found['gap']:.1e}"
                own = (f"{name}, {title}", f"{found['values']:,}", f"{min(seconds):.3f}", gap)
                try:
                    other = optimum(text, time_limit=HIGHS_LIMIT)
                except RuntimeError as error:
                    yield (*own, str(error), "", "")
                    continue
                same = "yes" if other.cost == found["cost"] else f"{other.cost / found['cost'] - 1:+.1e}"
                yield (*own, f"{other.seconds:.2f}", f"{other.seconds / min(seconds):.0f}", same)

    yield from table(
        ("small model, cluster", "values", "core s", "gap", "HiGHS s", "times the core's", "same cost"),
        rows(),
    )


PARTS: dict[str, Callable[[bool], Iterator[str]]] = {
    "models": lambda quick: models(tuple(REAL), quick),
    "depth": depth,
    "devices": devices,
    "speeds": speeds,
    "highs": highs,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="each once, fewer sizes and models")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument("--models", nargs="+", choices=REAL, help="of the part models")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the tables in this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [f"{os.cpu_count()} cores ({platform.machine()}), one used.", ""]
    print(lines[0], flush=True)
    for part in options.only:
        quick_models = ("GPT-2", "VGG19", "Llama-3-8B, 32 layers") if options.quick else tuple(REAL)
        made = (
            models(options.models or quick_models, options.quick)
            if part == "models"
            else PARTS[part](options.quick)
        )
        for line in made:
            lines.append(line)
            print(line, flush=True)
    if options.write is not None:
        text = options.write.read_text(encoding="utf-8")
        between = re.escape(MARKS[0]) + ".*?" + re.escape(MARKS[1])
        new = MARKS[0] + "\n".join(lines).rstrip() + "\n" + MARKS[1]
        options.write.write_text(re.sub(between, lambda _: new, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()

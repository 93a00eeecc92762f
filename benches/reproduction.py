"""HAP's evaluation (EuroSys 2024, section 7) in this cost model: predicted seconds of a training step.

    python benches/reproduction.py [EXPERIMENT ...] [--models NAME ...] [--write docs/reproduction.md]

Nothing is measured here but the seconds of ``synthesis``; every other number is a prediction, the same in every
run. ``--write`` replaces the experiments' tables between their marks in a file, and draws ``heterogeneous`` beside
it. What is predicted of what is in :mod:`hap_testbed`.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hetspmd.cluster.cluster import Cluster
from hetspmd.codec.files import write_atomically
from hetspmd.cost.model import CostModel
from hetspmd.optimize.synthesis import Clock
from hetspmd.profile.svg import Canvas
from hetspmd.ratios.starts import even, proportional
from hetspmd.rules.theory import Theory
from hetspmd.search import constraints as known

sys.path.append(str(Path(__file__).parent))

import hap_testbed as hap

SCALES = (1, 2, 4, 8)
Lines = list[str]


# experiments ----------------------------------------------------------------------------------------------

ARMS = ("DP-EV", "DP-CP", "DeepSpeed-like", "HAP-like", "hetspmd")
COLORS = ("#b9c4d0", "#7d93ab", "#d9a25f", "#8fbf9f", "#2a6f4e")
Series = dict[tuple[str, int], dict[str, hap.Judged]]


def arms(theory: Theory, cluster: Cluster) -> dict[str, hap.Judged]:
    """Every system on one testbed; DP-CP only where devices differ."""
    found = {"DP-EV": hap.forced(theory, cluster, known.data_parallel(theory), equal=True)}
    if cluster.devices[0] != cluster.devices[-1]:
        found["DP-CP"] = hap.forced(theory, cluster, known.data_parallel(theory), equal=False)
    found["DeepSpeed-like"] = hap.forced(theory, cluster, hap.deepspeed_like(theory), equal=True)
    found["HAP-like"] = hap.as_hap(theory, cluster)
    found["hetspmd"] = hap.synthesized(theory, cluster)
    return found


def _step(judged: hap.Judged | None) -> str:
    if judged is None:
        return ""
    text = f"{judged.seconds * 1e3:.0f} ms"
    return text if judged.fits else f"({text})"


def _gain(found: Mapping[str, hap.Judged], name: str) -> str:
    """How many times faster ``name`` is than the fastest baseline that fits."""
    others = [j.seconds for other, j in found.items() if other not in ("HAP-like", "hetspmd") and j.fits]
    return f"{min(others) / found[name].seconds:.2f}x" if others and found[name].fits else "-"


def compared(series: Series, names: Sequence[str], paper: Mapping[str, str]) -> Lines:
    """A line per model and scale; ``paper``: what HAP's text says of the model."""
    lines = [
        f"| model | GPUs | {' | '.join(names)} | HAP-like gains | hetspmd gains | active | the paper |",
        "|---|--:|" + "--:|" * len(names) + "--:|--:|--:|---|",
    ]
    last = ""
    for (model, count), found in series.items():
        cells = [_step(found.get(name)) for name in names]
        said = paper.get(model, "") if model != last else ""
        last = model
        gains = f"{_gain(found, 'HAP-like')} | {_gain(found, 'hetspmd')}"
        lines.append(
            f"| {model} | {count} | {' | '.join(cells)} | {gains} | {found['hetspmd'].active} | {said} |"
        )
    return lines


def at_scales(
    models: Sequence[hap.Benchmark], machines: Sequence[tuple[str, int]], scales: Sequence[int]
) -> Series:
    """Every arm, for every model and number of GPUs per machine."""
    series: Series = {}
    for b in models:
        for k in scales:
            cluster = hap.cluster_of(machines, k)
            series[b.name, cluster.world] = arms(hap.at_scale(b, cluster.world), cluster)
    return series


def heterogeneous(models: Sequence[hap.Benchmark], scales: Sequence[int] = SCALES) -> tuple[Lines, Series]:
    """HAP 7.2, Fig. 13."""
    series = at_scales(models, (hap.V100, hap.P100), scales)
    paper = {
        "VGG19": "up to 2.41x, at 32 GPUs, over DP",
        "ViT": "similar to DP-CP",
        "BERT-Base": "1.28x at 64 GPUs",
        "BERT-MoE": "similar to DeepSpeed; DP out of memory",
    }
    return compared(series, ARMS, paper), series


def homogeneous(models: Sequence[hap.Benchmark]) -> Lines:
    """HAP 7.3, Fig. 14: four machines of P100."""
    series = at_scales(models, (("p100", 4),), (2, 8))
    paper = {
        "VGG19": "up to 3.17x",
        "ViT": "up to 1.19x",
        "BERT-Base": "up to 1.22x",
        "BERT-MoE": "up to 1.13x",
    }
    return compared(series, [a for a in ARMS if a != "DP-CP"], paper)


def ablation(models: Sequence[hap.Benchmark]) -> Lines:
    """HAP 7.4, Fig. 15, at 64 GPUs: parts added one by one, then left out one by one."""
    lines = [
        "| model | DP-EV | +Q | +B | +C = all | even ratios | proportional ratios | one segment | no SFB | "
        "no grouped | SFB used | grouped used |",
        "|---|" + "--:|" * 11,
    ]
    for b in models:
        cluster = hap.cluster_of((hap.V100, hap.P100), SCALES[-1])
        theory = hap.at_scale(b, cluster.world)
        costs = CostModel(theory, cluster)
        all_ = hap.synthesized(theory, cluster)
        cells = [
            hap.forced(theory, cluster, known.data_parallel(theory), equal=True),
            hap.synthesized_at(theory, cluster, even(costs), without=hap.GROUPED, sfb=False),
            hap.synthesized(theory, cluster, without=hap.GROUPED, sfb=False),
            all_,
            hap.synthesized_at(theory, cluster, even(costs)),
            hap.synthesized_at(theory, cluster, proportional(costs)),
            hap.synthesized(theory, cluster, segments=1),
            hap.synthesized(theory, cluster, sfb=False),
            hap.synthesized(theory, cluster, without=hap.GROUPED),
        ]
        used = f"{hap.uses_of_sfb(all_)} of {len(hap.gradient_products(theory))}"
        shown = [f"{j.seconds * 1e3:.1f} ms" if j.fits else f"({j.seconds * 1e3:.1f} ms)" for j in cells]
        lines.append(f"| {b.name} | {' | '.join(shown)} | {used} | {hap.uses_of_grouped(all_.program)} |")
    return lines


def concurrent(models: Sequence[hap.Benchmark]) -> Lines:
    """HAP 7.5, Fig. 16: one model on all machines against one on V100 and another on P100 machines."""
    lines = [
        "| model | GPUs | V100 alone | P100 alone | all | throughput of all | HAP |",
        "|---|" + "--:|" * 6,
    ]
    for b in models:
        for k in (1, 8):
            steps = []
            for kinds in ((hap.V100,), (hap.P100,), (hap.V100, hap.P100)):
                cluster = hap.cluster_of(kinds, k)
                steps.append((cluster.world, hap.synthesized(hap.at_scale(b, cluster.world), cluster)))
            apart, whole = sum(n / j.seconds for n, j in steps[:2]), steps[2][0] / steps[2][1].seconds
            shown = " | ".join(_step(j) for _, j in steps)
            lines.append(f"| {b.name} | {steps[2][0]} | {shown} | {whole / apart:.0%} | 64 % to 96 % |")
    return lines


def experts(_models: Sequence[hap.Benchmark]) -> Lines:
    """HAP 7.6, Fig. 17: 2 A100 and 2 P100; DeepSpeed pads the experts to a multiple of four."""
    cluster = hap.cluster_of((("a100", 1), ("p100", 1)), 2)
    lines = [
        "| experts | DeepSpeed-like, padded | HAP-like | its experts | hetspmd | its experts | HAP-like gains | "
        "hetspmd gains | the paper |",
        "|--:|--:|--:|---|--:|---|--:|--:|---|",
    ]
    for count in range(4, 10):
        theory = hap.theory_of(partial(hap.bert_moe, 16 * count, 4, count))
        full = 4 * math.ceil(count / 4)
        padded = hap.theory_of(partial(hap.bert_moe, 16 * count, 4, count, full))
        other = hap.forced(padded, cluster, hap.deepspeed_like(padded), equal=True)
        cells, gains = [_step(other)], []
        for found in (hap.as_hap(theory, cluster), hap.synthesized(theory, cluster)):
            cells += [_step(found), " + ".join(map(str, hap.experts_placed(found)))]
            gains.append(f"{other.seconds / found.seconds:.2f}x")
        said = "up to 1.64x" if count == 4 else ""
        lines.append(f"| {count} | {' | '.join(cells + gains)} | {said} |")
    return lines


def sensitivity(models: Sequence[hap.Benchmark]) -> Lines:
    """Fig. 13 at 64 GPUs where devices reach only a part of the data sheet's rates."""
    lines = [
        f"| model | of the peak | {' | '.join(ARMS)} | HAP-like gains | hetspmd gains |",
        "|---|" + "--:|" * 8,
    ]
    for b in models:
        for efficiency in (0.5, 0.3):
            cluster = hap.cluster_of((hap.V100, hap.P100), SCALES[-1], efficiency=efficiency)
            found = arms(hap.at_scale(b, cluster.world), cluster)
            shown = " | ".join(_step(found[a]) for a in ARMS)
            gains = f"{_gain(found, 'HAP-like')} | {_gain(found, 'hetspmd')}"
            lines.append(f"| {b.name} | {efficiency:.0%} | {shown} | {gains} |")
    return lines


def synthesis(_models: Sequence[hap.Benchmark]) -> Lines:
    """HAP 7.8, Fig. 19: seconds on this machine for ViT on 64 GPUs."""
    lines = ["| layers | instructions | trace and rules | search | ratios | total |", "|--:|" + "--:|" * 5]
    cluster = hap.cluster_of((hap.V100, hap.P100), SCALES[-1])
    for layers in (2, 4, 8, 12, 16, 20, 24):
        clock = Clock()
        started = time.perf_counter()
        theory = hap.theory_of(partial(hap.vit, 64 * cluster.world, cluster.world, layers))
        traced = time.perf_counter() - started
        hap.synthesized(theory, cluster, clock=clock)
        total = time.perf_counter() - started
        parts = (traced, clock.seconds["synth"], clock.seconds["balance"], total)
        shown = " | ".join(f"{s:.1f} s" for s in parts)
        lines.append(f"| {layers} | {len(theory.graph.instructions):,} | {shown} |")
    return lines


# output ---------------------------------------------------------------------------------------------------


def chart(series: Series) -> str:
    """Fig. 13: step seconds, a panel per model, bars per scale and system; pale where it does not fit."""
    models = list(dict.fromkeys(model for model, _ in series))
    wide, high, top, left = 230.0, 150.0, 52.0, 46.0
    canvas = Canvas(left + len(models) * (wide + 30), top + high + 44)
    for n, (name, color) in enumerate(zip(ARMS, COLORS, strict=True)):
        canvas.box(left + 130 * n, 10, 11, 11, color)
        canvas.text(left + 130 * n + 16, 20, name)
    canvas.text(left + 130 * len(ARMS), 20, "outlined: does not fit into memory", color="#666")
    for m, model in enumerate(models):
        x0, base = left + m * (wide + 30), top + high
        groups = {count: found for (name, count), found in series.items() if name == model}
        limit = max(j.seconds for found in groups.values() for j in found.values())
        canvas.text(x0 + wide / 2 - 15, top - 12, model, size=13, anchor="middle", bold=True)
        tick = 10.0 ** math.floor(math.log10(limit)) / 2
        tick *= 2 if limit / tick > 10 else 1
        for i in range(int(limit / tick) + 1):
            y = base - high * i * tick / limit
            canvas.line(x0, y, x0 + wide - 30, y, "#e4e4e4")
            canvas.text(x0 - 4, y + 4, f"{i * tick:g}", size=9, anchor="end", color="#666")
        each = (wide - 30) / len(groups)
        for g, (count, found) in enumerate(groups.items()):
            bar = (each - 10) / len(ARMS)
            for n, (name, color) in enumerate(zip(ARMS, COLORS, strict=True)):
                tall = high * found[name].seconds / limit
                x = x0 + g * each + 5 + n * bar
                canvas.box(x, base - tall, bar - 1, tall, color)
                if not found[name].fits and tall > 2:
                    canvas.box(x + 1, base - tall + 1, bar - 3, tall - 1, "#fff")
            canvas.text(x0 + g * each + each / 2, base + 14, str(count), size=10, anchor="middle")
        canvas.line(x0, base, x0 + wide - 30, base, "#444")
        canvas.text(x0 + wide / 2 - 15, base + 32, "GPUs", size=10, anchor="middle", color="#666")
    canvas.text(4, top - 12, "s / step", size=10, color="#666")
    return canvas.render()


EXPERIMENTS: Mapping[str, Callable[[Sequence[hap.Benchmark]], Any]] = {
    "heterogeneous": heterogeneous, "homogeneous": homogeneous, "ablation": ablation, "concurrent": concurrent,
    "experts": experts, "sensitivity": sensitivity, "synthesis": synthesis,
}  # fmt: skip


def replaced(text: str, name: str, lines: Lines) -> str:
    """``text`` with the lines between the marks of an experiment. Raises ValueError if they are missing."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    if start not in text or end not in text:
        raise ValueError(f"there are no marks {start.strip()} and {end}")
    head, rest = text.split(start, 1)
    return head + start + "\n".join(lines) + "\n" + end + rest.split(end, 1)[1]


def main() -> None:
    """Print the tables, or write them into a file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=f"of {', '.join(EXPERIMENTS)}")
    parser.add_argument(
        "--models", nargs="*", default=[], metavar="NAME", help="such as VGG19 (default: all)"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the tables in this file")
    options = parser.parse_args()
    names = options.experiments or list(EXPERIMENTS)
    if unknown := [n for n in names if n not in EXPERIMENTS]:
        parser.error(f"no experiment {unknown[0]!r}; there are {', '.join(EXPERIMENTS)}")
    models = [b for b in hap.BENCHMARKS if not options.models or b.name in options.models]
    if not models:
        parser.error(f"no such model; there are {', '.join(b.name for b in hap.BENCHMARKS)}")
    torch.set_num_threads(1)
    for name in names:
        started = time.perf_counter()
        found = EXPERIMENTS[name](models)
        lines, series = found if isinstance(found, tuple) else (found, None)
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
        if options.write is None:
            print("\n".join(lines), end="\n\n", flush=True)
            continue
        text = replaced(options.write.read_text(encoding="utf-8"), name, lines)
        write_atomically(options.write, text)
        if series is not None:
            write_atomically(options.write.with_suffix(".svg"), chart(series))


if __name__ == "__main__":
    main()

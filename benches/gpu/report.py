"""What the lines say, as Markdown, and the page of the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from emulated.pages import replace_results
from gpu import results
from gpu.machine import words
from gpu.points import ARMS, COMPILED, EAGER, TRUST, UNLIKE, Key
from gpu.results import Line
from gpu.statistics import checks, predictions, ratio, ratios
from hetspmd.codec.files import write_atomically
from versus.points import COMPILED as HETSPMD
from versus.points import INCUMBENTS
from versus.statistics import best_incumbent, over_best, over_ddp

NOTHING = "Nothing has been measured."
TITLES = {
    EAGER: "hetspmd beside eager PyTorch, on one GPU",
    COMPILED: "`compile=True` beside `torch.compile`, on one GPU",
    UNLIKE: "Unlike GPUs",
    TRUST: "Predicted and measured",
}
GIB = 1 << 30


def write(page: Path, lines: Sequence[Line], keys: Sequence[Key]) -> None:
    """Replace what stands between the page's marks, and the lines with the suffix ``.jsonl``.

    Raises ValueError for a page without the marks.
    """
    replace_results(page, f"{summary(lines, keys)}\n\n{tables(lines)}\n")
    write_atomically(page.with_suffix(".jsonl"), results.text(lines))


def summary(lines: Sequence[Line], keys: Sequence[Key]) -> str:
    """The requirements; ``keys``: the points that a whole run has."""
    done = sum(line.measured for line in lines)
    return "\n".join((f"- {done} of {len(keys)} points measured", *(f"- {c}" for c in checks(lines, keys))))


def tables(lines: Sequence[Line]) -> str:
    """The machines, a table of each part, and the points that were not measured."""
    machines = list(dict.fromkeys(words(line.machine) for line in lines if line.measured))
    parts = [_machines(machines, lines)] if machines else []
    for part, title in TITLES.items():
        of = [line for line in lines if line.part == part and line.measured]
        make = {UNLIKE: _unlike, TRUST: _trust}.get(part, _one_gpu)
        parts.append(f"### {title}\n\n{make(part, of, machines) if of else NOTHING}")
    if gone := [line for line in lines if not line.measured]:
        parts.append(f"### Not measured\n\n{_gone(gone)}")
    return "\n\n".join(parts)


def _machines(machines: Sequence[str], lines: Sequence[Line]) -> str:
    """The machines by number, and on which days they measured."""
    rows = []
    for number, machine in enumerate(machines, 1):
        days = sorted({line.day for line in lines if line.measured and words(line.machine) == machine})
        rows.append([str(number), machine, ", ".join(days)])
    return _table(["machine", "what it is", "days"], rows, left=3)


def _one_gpu(part: str, lines: Sequence[Line], machines: Sequence[str]) -> str:
    """A row per point of one GPU: milliseconds and GiB."""
    torchs, own = ARMS[part]
    head = [
        "model", "precision", "rows", "machine", f"{torchs}, ms", f"{own}, ms", "ratio", "middle half",
        "host launching", f"{torchs}, GiB", f"{own}, GiB",
    ]  # fmt: skip
    rows = []
    for line in lines:
        of, quarter = ratios(line), len(line.arms[own].seconds) // 4
        rows.append(
            [
                line.model, line.precision, _rows(line), _number(line, machines),
                *(f"{1e3 * line.seconds(name):.2f}" for name in (torchs, own)), f"{ratio(line):.3f}",
                f"{of[quarter]:.3f} to {of[-1 - quarter]:.3f}", f"{median(line.arms[torchs].launched):.0%}",
                *(_gib(line.arms[name].peak) for name in (torchs, own)),
            ]
        )  # fmt: skip
    return _table(head, rows, left=4)


def _unlike(part: str, lines: Sequence[Line], machines: Sequence[str]) -> str:
    """A row per point of unlike GPUs: medians in milliseconds, the best incumbent's bold."""
    del part
    head = [
        "model", "precision", "shares", "machine", "comm / comp", *INCUMBENTS, HETSPMD, "least to most",
        "predicted", "best / hetspmd", "DDP / hetspmd", "plan",
    ]  # fmt: skip
    rows = []
    for line in lines:
        best, own = best_incumbent(line), line.arms[HETSPMD]
        seconds = [_ms(line.seconds(name), bold=name == best) for name in INCUMBENTS]
        rows.append(
            [
                line.model, line.precision, line.at, _number(line, machines),
                f"{line.communicating / line.computing:.2f}", *seconds, _ms(own.median),
                f"{_ms(min(own.seconds))} to {_ms(max(own.seconds))}",
                "" if own.predicted is None else _ms(own.predicted), f"{over_best(line):.2f}",
                f"{over_ddp(line):.2f}", own.words,
            ]
        )  # fmt: skip
    return f"Milliseconds a step; medians.\n\n{_table(head, rows, left=4)}"


def _trust(part: str, lines: Sequence[Line], machines: Sequence[str]) -> str:
    """A row per plan that was forced, and per plan of hetspmd beside them."""
    del part
    head = ["model", "precision", "shares", "machine", "plan", "predicted, ms", "measured, ms", "error"]
    rows = [
        [
            p.line.model, p.line.precision, p.line.at, _number(p.line, machines), p.plan, _ms(p.predicted),
            _ms(p.measured), f"{p.error:+.1%}",
        ]
        for p in predictions(lines)
    ]  # fmt: skip
    return _table(head, rows, left=5)


def _gone(lines: Sequence[Line]) -> str:
    """A row per point that failed or was skipped, with the reason of the point or of its arms."""
    rows = []
    for line in lines:
        reasons = [f"{name}: {arm.reason}" for name, arm in line.arms.items() if arm.reason]
        said = line.reason or "; ".join(reasons)
        kind = "skipped" if line.skipped else "failed"
        rows.append([line.part, line.model, line.precision, line.at, kind, said.replace("|", "\\|")])
    return _table(["part", "model", "precision", "at", "what", "reason"], rows, left=6)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A table in Markdown, of which the first ``left`` columns are text."""
    marks = "|" + "---|" * left + "--:|" * (len(head) - left)
    return "\n".join((f"| {' | '.join(head)} |", marks, *(f"| {' | '.join(row)} |" for row in rows)))


def _number(line: Line, machines: Sequence[str]) -> str:
    """Of the line's machine."""
    return str(machines.index(words(line.machine)) + 1)


def _rows(line: Line) -> str:
    """The batch: rows, and the tokens or pixels of each."""
    each = line.size.get("tokens")
    text = str(line.size.get("batch", ""))
    return f"{text} x {each}" if each else text


def _gib(peak: int | None) -> str:
    return "" if peak is None else f"{peak / GIB:.2f}"


def _ms(seconds: float, *, bold: bool = False) -> str:
    text = f"{1e3 * seconds:.1f}"
    return f"**{text}**" if bold else text

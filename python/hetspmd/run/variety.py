"""How many plans a HAP module keeps, and a warning where each value of an argument makes another one.

A number or string of the batch is part of a plan: another value is another graph. A value that changes in every
step would compile in every step, so that the third one is warned about, and few plans of one group are kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetspmd.errors import PlanPerValueWarning
from hetspmd.trace.host.places import text

if TYPE_CHECKING:
    from hetspmd.run.entry import Entry

ALIKE_PLANS_WARNED = 3
"""Plans that differ in plain values alone, at which a warning says so: two may be meant, such as for two modes."""
ALIKE_PLANS_HELD = 8
"""Plans that stay of those that differ in plain values alone: where a value changes in each step, there is no end
of them."""
PLANS_HELD = 64
"""Plans that stay in all, so that memory does not grow with the steps."""
_NOT_READ = "not read"


def make_room(entries: list[Entry]) -> None:
    """Warn about the last entry if it is one of many, and drop those that were used least lately.

    The first entry is kept always: it decides where parameters live. The order of use is the same on every rank,
    and so is what is dropped.
    """
    new = entries[-1]
    alike = [entry for entry in entries if _shape(entry) == _shape(new)]
    if len(alike) == ALIKE_PLANS_WARNED:
        warnings.warn(_text(alike), PlanPerValueWarning, stacklevel=4)
    for group, most in ((alike, ALIKE_PLANS_HELD), (entries, PLANS_HELD)):
        if len(group) > most:
            _drop(entries, group)


def _drop(entries: list[Entry], group: Sequence[Entry]) -> None:
    old = min((entry for entry in group if entry is not entries[0]), key=lambda entry: entry.used)
    entries[:] = [entry for entry in entries if entry is not old]


def _shape(entry: Entry) -> tuple[object, ...]:
    """What two entries have in common that differ in plain values alone."""
    wanted = entry.expected
    tensors = tuple(leaf if isinstance(leaf, tuple) else None for leaf in wanted.leaves)
    return entry.mode, wanted.keywords, wanted.spec, tensors, entry.differentiable


def _text(alike: Sequence[Entry]) -> str:
    wanted = [entry.expected for entry in alike]
    parts = []
    for k, name in enumerate(wanted[0].names):
        values = [w.leaves[k] for w in wanted]
        if len({(type(v), repr(v)) for v in values}) > 1:
            parts.append(f"{name} is {', '.join(map(repr, values))}")
    parts += [f"{name} is {', '.join(texts)}" for name, texts in _read(alike)]
    return (
        f"{len(alike)} plans were compiled because plain values of the batch or of the model change: "
        f"{'; '.join(parts)}. A number or string of the batch, and one of the model that decides "
        "which ops there are, is "
        "part of the plan. Give a number that only scales as a tensor, torch.tensor(value), or make "
        "it a buffer of the "
        f"model; of plans that differ in such values alone, {ALIKE_PLANS_HELD} are kept"
    )


def _read(alike: Sequence[Entry]) -> list[tuple[str, list[str]]]:
    """Names and values of what forwards read that differs, first of all what each of them reads."""
    each = [
        {text(read.root, read.path): read.value for read in entry.plan.graph.host.reads} for entry in alike
    ]
    values = {
        name: list(dict.fromkeys(reads.get(name, _NOT_READ) for reads in each))
        for name in dict.fromkeys(name for reads in each for name in reads)
    }
    differ = [(name, texts) for name, texts in values.items() if len(texts) > 1]
    return sorted(differ, key=lambda one: _NOT_READ in one[1])[:3]

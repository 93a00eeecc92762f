"""The options that all ranks must have been made with, and the rules of ops of the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from hetspmd.dist.parting import ranks_text
from hetspmd.errors import OptionError, RuleError
from hetspmd.rules.rule_digest import python_version, rule_digests

if TYPE_CHECKING:
    from hetspmd.cluster.cluster import Cluster
    from hetspmd.dist.communicator import Communicator
    from hetspmd.optimize.compile_options import CompileOptions
    from hetspmd.run.run_options import RunOptions

OWN: Final = frozenset(
    ("device", "process_group", "timeout", "compile", "cuda_graphs", "loss", "timings", "progress")
)
"""The options in which ranks may differ: how a rank runs its part, and what it is told. A loss is code; the traces
of it are compared."""

_LONGEST: Final = 80
"""Characters of a value in an error."""


def check_same_options(
    communicator: Communicator,
    cluster: Cluster,
    run: RunOptions,
    compilation: CompileOptions,
    *,
    with_plan: bool,
) -> None:
    """Raise OptionError on every rank, with the option and its values, unless all ranks have the same cluster and
    the same options but for :data:`OWN`: the plan is made on one rank, so that what another asks for would be
    lost. Raise RuleError where they have registered unlike rules, by which each lowers its part."""
    asked = {"plan": "..." if with_plan else "None", "cluster": sha256(repr(cluster).encode()).hexdigest()}
    for options in (run, compilation):
        names = (field.name for field in fields(options) if field.name not in OWN)
        asked |= {name: _text(getattr(options, name)) for name in names}
    told = communicator.exchange((asked, python_version(), rule_digests()))
    for name in asked:
        values = [options[name] for options, _, _ in told]
        if len(set(values)) > 1:
            raise OptionError(_difference(name, values))
    if text := _unlike_rules([(version, rules) for _, version, rules in told]):
        raise RuleError(text)


def _unlike_rules(told: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """What to say where ranks have unlike rules of an op; "" where they have not. ``told``: of each rank Python's
    version, within which digests are comparable, and the digests of its rules."""
    for op in sorted({op for _, rules in told for op in rules}):
        having = [rank for rank, (_, rules) in enumerate(told) if op in rules]
        if len(having) < len(told):
            lacking = [rank for rank in range(len(told)) if rank not in having]
            return (
                f"there is a rule of {op} on {ranks_text(having)}, and none on {ranks_text(lacking)}; register the "
                "same rules on every rank before HAP(...)"
            )
        first: dict[str, int] = {}
        for rank, (version, rules) in enumerate(told):
            other = first.setdefault(version, rank)
            if rules[op] != told[other][1][op]:
                return (
                    f"{ranks_text([rank])} has another rule of {op} than {ranks_text([other])}: every rank needs "
                    "the same version of the code that registers it"
                )
    return ""


def _text(value: Any) -> str:
    """A value as text that is the same where the value is; a mapping that says nothing is as good as none."""
    if isinstance(value, Mapping) and not value:
        return "None"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{key!r}: {_text(part)}' for key, part in value.items()))}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    return repr(value)


def _difference(name: str, values: list[str]) -> str:
    """What the ranks whose value is not the first rank's were made with."""
    others = [rank for rank, value in enumerate(values) if value != values[0]]
    own = [rank for rank in others if values[rank] == values[others[0]]]
    first = [rank for rank, value in enumerate(values) if value == values[0]]
    if name == "cluster":
        return f"{ranks_text(own)} was made with another cluster than {ranks_text(first)}; give every rank the same"
    return (
        f"{ranks_text(own)} was made with {name}={_short(values[own[0]])}, {ranks_text(first)} with "
        f"{name}={_short(values[0])}; give every rank the same"
    )


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."

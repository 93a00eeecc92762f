"""The options that all ranks must have been made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from hetspmd.dist.parting import ranks_text
from hetspmd.errors import OptionError

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
    lost."""
    asked = {"plan": "..." if with_plan else "None", "cluster": sha256(repr(cluster).encode()).hexdigest()}
    for options in (run, compilation):
        names = (field.name for field in fields(options) if field.name not in OWN)
        asked |= {name: _text(getattr(options, name)) for name in names}
    told = communicator.exchange(asked)
    for name in asked:
        values = [other[name] for other in told]
        if len(set(values)) > 1:
            raise OptionError(_difference(name, values))


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

"""How the ranks parted, in words: from what each of them said in one round of the roll call."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hetspmd.dist.own_rows_words import ORDER, ORDERED, OWN, PARTED
from hetspmd.errors import (
    BatchMismatchError,
    CollectiveMismatchError,
    HetspmdError,
    ParameterMismatchError,
)

_NAMED: Final = 4
"""Arguments of which a message speaks."""

FACTOR: Final = "the factor of the loss"
"""The name of what a backward multiplies the gradients of the loss by."""

Replica = tuple[str, int, float, float]
"""Name, digest, projection and square of a piece of a replicated tensor."""


@dataclass(frozen=True)
class Told:
    """What a rank said; see :class:`hetspmd.dist.roll.RollCall`."""

    what: str
    key: str
    mode: str
    of: int
    inputs: tuple[tuple[str, int], ...]
    replicas: tuple[Replica, ...] | None
    tolerances: tuple[float, ...]
    arguments: tuple[str, ...]
    doings: tuple[tuple[str, int, dict[str, str]], ...]

    @classmethod
    def of_json(cls, said: Any) -> Told:
        """From what travels."""
        replicas = said["replicas"]
        return cls(
            said["what"],
            said["key"],
            said["mode"],
            said["of"],
            tuple((path, digest) for path, digest in said["inputs"]),
            None if replicas is None else tuple((n, d, _number(p), _number(s)) for n, d, p, s in replicas),
            tuple(said["tolerances"]),
            tuple(said["arguments"]),
            tuple((what, number, details) for what, number, details in said["doings"]),
        )


def _number(bits: str) -> float:
    (value,) = struct.unpack("<d", bytes.fromhex(bits))
    return float(value)


def parted(told: Sequence[Told | None], rank: int) -> HetspmdError | None:
    """The error of this round, None if rounding explains the differences.

    A rank whose words did not come is left out.
    """
    said = {r: t for r, t in enumerate(told) if t is not None}
    if len(said) == 1:
        return CollectiveMismatchError(
            f"another rank does something else than rank {rank}, which is in {said[rank].what}, but did not "
            "say what"
        )
    return (
        _calls(said) or _arguments(said) or _modes(said) or _doings(said) or _inputs(said) or _replicas(said)
    )


def _calls(said: dict[int, Told]) -> HetspmdError | None:
    text = apart({rank: told.what for rank, told in said.items()})
    return CollectiveMismatchError(text) if text else None


def apart(places: dict[int, str]) -> str:
    """What to say of ranks that are at these places, "" where all are at the same."""
    groups = _groups(places, str)
    if len(groups) == 1:
        return ""
    parts = [f"{ranks_text(ranks)} in {place}" for place, ranks in groups]
    return (
        f"the ranks have parted: {', '.join(parts)}. Every rank makes the same calls of HAP in the same order; "
        "look for a call under `if rank == 0:`, a loader that is longer on one rank, or a step that one leaves out"
    )


def _arguments(said: dict[int, Told]) -> HetspmdError | None:
    groups = _groups(said, lambda t: t.arguments)
    if len(groups) == 1:
        return None
    shared = set(groups[0][0]).intersection(*(arguments for arguments, _ in groups))
    parts = []
    for arguments, ranks in groups:
        own = [argument for argument in arguments if argument not in shared]
        more = f" and {len(own) - _NAMED} more" if len(own) > _NAMED else ""
        parts.append(f"{ranks_text(ranks)} with {', '.join(own[:_NAMED]) or 'none of these'}{more}")
    what = next(iter(said.values())).what
    return CollectiveMismatchError(
        f"the ranks have parted in {what}: {'; '.join(parts)}. Every rank makes the call with the same arguments, "
        "over the same parameters"
    )


def _modes(said: dict[int, Told]) -> HetspmdError | None:
    groups = _groups(said, lambda t: (t.key, t.mode))
    if len({key for (key, _), _ in groups}) == 1:
        return None
    what = next(iter(said.values())).what
    parts = [f"{ranks_text(ranks)}: {mode}" for (_, mode), ranks in groups]
    odd = ranks_text(groups[-1][1])
    if any(mode.startswith(OWN) for (_, mode), _ in groups):
        return BatchMismatchError(
            f"at {what} {odd} called the model in another mode or on another batch than {ranks_text(groups[0][1])} "
            f"({'; '.join(parts)}); {PARTED}"
        )
    return BatchMismatchError(
        f"at {what} {odd} called the model in another mode or on a batch of another shape than "
        f"{ranks_text(groups[0][1])} ({'; '.join(parts)}); every rank takes the same global batch, in the "
        "same mode, and HAP uses its own share of it: no DistributedSampler, and train(), eval(), no_grad() and "
        "autocast alike"
    )


def _doings(said: dict[int, Told]) -> HetspmdError | None:
    for place in range(max(len(told.doings) for told in said.values())):
        did = {r: t.doings[place] if place < len(t.doings) else None for r, t in said.items()}
        groups = _groups(did, lambda doing: None if doing is None else doing[:2])
        if len(groups) == 1:
            continue
        named = [(did[ranks[0]], ranks) for _, ranks in groups]
        details = [doing[2] for doing, _ in named if doing is not None]
        keys = dict.fromkeys(key for detail in details for key in detail)
        differing = [key for key in keys if len({detail.get(key) for detail in details}) > 1][:3]
        parts = []
        for doing, ranks in named:
            values = [f"{key} {doing[2][key]}" for key in differing if key in doing[2]] if doing else []
            what = doing[0] if doing else "nothing (more)"
            parts.append(f"{ranks_text(ranks)}: {what}{' with ' if values else ''}{', '.join(values)}")
        return ParameterMismatchError(
            f"before {next(iter(said.values())).what} the ranks did not do the same to the model's parameters "
            f"({'; '.join(parts)}). Every rank calls zero_grad(), backward(), step() of optimizers and schedulers "
            "and load_state_dict(state) alike, with the same options, learning rates and states. Go on from the "
            "last checkpoint: hap.load_full_state_dict(state) on every rank"
        )
    return None


def _inputs(said: dict[int, Told]) -> HetspmdError | None:
    first = next(iter(said.values()))
    for place, (path, _) in enumerate(first.inputs):
        groups = _groups(said, lambda t, i=place: t.inputs[i][1])  # type: ignore[misc]  # i is bound
        if len(groups) == 1:
            continue
        where = f"at step {first.of}"
        if len(groups) == len(said):
            text = f"{where} every rank was given another {path}"
        else:
            others = [r for _, ranks in groups[1:] for r in ranks]
            odd = ranks_text(sorted(others))
            text = f"{where} {odd} was given another {path} than {ranks_text(groups[0][1])}"
        if path == ORDER:
            return BatchMismatchError(f"{text}; {ORDERED}")
        if first.inputs[0][0] == ORDER:
            return BatchMismatchError(
                f"{text}, which is no rows of the batch; what is not of the samples is the same on every rank"
            )
        return BatchMismatchError(
            f"{text}; every rank takes the same global batch and HAP uses its own share of it: no "
            "DistributedSampler, and the same seed for shuffling and augmenting on every rank. "
            "(HAP(..., check_batches=False) if only the rows that a rank uses are right on it)"
        )
    return None


def _replicas(said: dict[int, Told]) -> HetspmdError | None:
    holding = {r: t for r, t in said.items() if t.replicas is not None}
    if len(holding) < 2:
        return None
    first = next(iter(holding.values()))
    assert first.replicas is not None
    for place, ((name, *_), tolerance) in enumerate(zip(first.replicas, first.tolerances, strict=True)):
        pieces = {r: t.replicas[place] for r, t in holding.items() if t.replicas is not None}
        groups = _groups(pieces, lambda piece, t=tolerance: _rounded(piece, t))  # type: ignore[misc]  # t is bound
        if len(groups) == 1 or _close(list(pieces.values()), tolerance):
            continue
        others = sorted(r for _, ranks in groups[1:] for r in ranks)
        if name == FACTOR:
            return _other_factors(first.of, [(piece, ranks) for piece, ranks in groups])
        return ParameterMismatchError(
            f"at step {first.of} {ranks_text(others)} held another {name} than {ranks_text(groups[0][1])}, "
            "although the plan keeps a whole copy of it on every rank: something changed it on one rank alone. "
            "Usual causes: a norm of one rank's gradients alone (call hetspmd.clip_grad_norm_(hap, max_norm)), an "
            "optimizer, a learning rate or a scheduler that is not the same on every rank, a state dict that one "
            "rank alone has loaded, an update under `if rank == 0:`. Go on from the last checkpoint: "
            "hap.load_full_state_dict(state) on every rank"
        )
    return None


def _other_factors(step: int, groups: Sequence[tuple[Any, Sequence[int]]]) -> HetspmdError:
    parts = [f"{ranks_text(ranks)}: {math.sqrt(square):g}" for (_, square), ranks in groups]
    return ParameterMismatchError(
        f"before step {step} the ranks multiplied the loss by other numbers before backward() ({'; '.join(parts)}), "
        "so that each added to its own part of the model what belongs to another loss. The loss is that of the "
        "whole batch, and the same on every rank: divide it by what is the same, too (the samples or tokens of the "
        "batch, not those of a rank). Go on from the last checkpoint: hap.load_full_state_dict(state) on every rank"
    )


def _rounded(piece: Replica, tolerance: float) -> Hashable:
    return piece[1] if tolerance == 0.0 else (piece[2], piece[3])


def _close(pieces: Sequence[Replica], tolerance: float) -> bool:
    """Whether the projections differ by no more than rounding may have made of equal tensors."""
    if tolerance == 0.0:
        return False
    projections, squares = [p[2] for p in pieces], [p[3] for p in pieces]
    if not all(map(math.isfinite, (*projections, *squares))):
        return not any(map(math.isfinite, (*projections, *squares)))
    return max(projections) - min(projections) <= tolerance * math.sqrt(max(squares))


def _groups(values: dict[int, Any], of: Callable[[Any], Hashable]) -> list[tuple[Any, list[int]]]:
    """The ranks by what ``of`` says of them: the most first, of as many that with the first rank."""
    groups: dict[Hashable, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(of(value), []).append(rank)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as a subject: rank 3; ranks 0, 1 and 2."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"

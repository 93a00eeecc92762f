"""Is a case on ranks what it is on one device?

The bound of a number is what rounding may make of it. It is measured: the loop runs on one device from weights that
are disturbed by a few units in the last place of the narrowest type in which the model computes.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foreign.registry import Case
from foreign.run import RANKS, Run, in_float64
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import (
    CollectiveMismatchError,
    HetspmdError,
    MissingRuleWarning,
    ProofError,
    RankFailedError,
)

EQUAL, REFUSED, WRONG, CRASHED, HUNG, BROKEN = "equal", "refused", "WRONG", "CRASHED", "HUNG", "broken"
"""Outcomes. Broken: one device alone cannot run the case, which says nothing about hetspmd and is not counted."""

FAULTS = (WRONG, CRASHED, HUNG)
MARGIN = 50.0
FLOOR = 1e-9
NOT_A_REFUSAL = (CollectiveMismatchError, RankFailedError, ProofError)
"""Named errors that mean a fault of hetspmd where all ranks do the same."""


@dataclass(frozen=True)
class Outcome:
    """``detail`` is the refusal's class and first line, or what is wrong."""

    name: str
    package: str
    kind: str
    outcome: str
    detail: str = ""
    divided: float | None = None
    noise: float = 0.0
    seconds: float = 0.0
    missing: tuple[str, ...] = ()


class Narrowest(TorchDispatchMode):
    """The largest unit in the last place among the floating types of what ops return."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = torch.finfo(torch.float64).eps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                self.unit = max(self.unit, torch.finfo(leaf.dtype).eps)
        return out


def judge(case: Case) -> Outcome:
    """The outcome of a case, but for a hang."""
    started = time.monotonic()
    with warnings.catch_warnings(), in_float64():
        warnings.simplefilter("ignore")
        found = _judged(case)
    return Outcome(case.name, case.package, case.kind, **found, seconds=time.monotonic() - started)


def _made(case: Case) -> Any:
    torch.manual_seed(0)
    return case.make()


def _judged(case: Case) -> dict[str, Any]:
    try:
        narrowest = Narrowest()
        with narrowest:
            want = case.play(Run(), _made(case))
        others = [
            case.play(Run(disturbance=s * narrowest.unit), _made(case)) for s in (1.0, -2.0)
        ]  # fmt: skip
    except Exception as error:
        return {"outcome": BROKEN, "detail": _first_lines(error, 3)}
    leaves, noise = named(want), 0.0
    bounds = {}
    for at, value in leaves.items():
        size = max((_distance(named(o)[at], value) for o in others), default=0.0)
        bounds[at] = max(MARGIN * size, 8 * narrowest.unit, FLOOR)
        noise = max(noise, size)
    on_ranks, missing = _on_ranks(case)
    divided = next((d for d, _ in on_ranks if d is not None), None)
    errors = [r for _, r in on_ranks if isinstance(r, BaseException)]
    rest = {"divided": divided, "noise": noise, "missing": missing}
    if errors:
        return {**_of_errors(errors), **rest}
    for rank, (_, result) in enumerate(on_ranks):
        wrong = _first_difference(named(result), leaves, bounds)
        if wrong:
            return {"outcome": WRONG, "detail": f"rank {rank}: {wrong}", **rest}
    return {"outcome": EQUAL, **rest}


def _on_ranks(case: Case) -> tuple[list[tuple[float | None, Any]], tuple[str, ...]]:
    """Per rank, how much is divided, and the result or the error; the ops that have no rule."""
    copies = [_made(case) for _ in range(RANKS)]

    def on_rank(communicator: Communicator) -> tuple[float | None, Any]:
        run = Run(communicator)
        try:
            result: Any = case.play(run, copies[communicator.rank])
        except Exception as error:
            result = error
        return run.divided(), result

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", MissingRuleWarning)
        try:
            found = run_ranks(RANKS, on_rank)
        except Exception as error:
            found = [(None, error)]
    said = [str(w.message) for w in seen if issubclass(w.category, MissingRuleWarning)]
    return found, tuple(
        sorted({word.rstrip(",:") for m in said for word in m.split() if word.startswith("aten.")})
    )


def _of_errors(errors: list[BaseException]) -> dict[str, Any]:
    """A refusal where every rank raises the same named error."""
    for error in errors:
        if not isinstance(error, HetspmdError):
            traceback.print_exception(error)
            return {"outcome": CRASHED, "detail": _first_lines(error, 2)}
    kinds = {type(e) for e in errors}
    if len(errors) == RANKS and len(kinds) == 1 and not issubclass(*kinds, NOT_A_REFUSAL):
        return {"outcome": REFUSED, "detail": _first_lines(errors[0], 1)}
    first = next((e for e in errors if not isinstance(e, CollectiveMismatchError)), errors[0])
    traceback.print_exception(first)
    return {"outcome": CRASHED, "detail": f"{len(errors)} of {RANKS} ranks: {_first_lines(first, 1)}"}


def _first_lines(error: BaseException, count: int) -> str:
    text = " ".join(" ".join(str(error).strip().splitlines()[:count]).split())
    return f"{type(error).__name__}: {text}"


def named(value: Any, at: str = "") -> dict[str, Any]:
    """The leaves of nested dicts, lists and tuples by their path."""
    items: Any
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return {at: value}
    found: dict[str, Any] = {}
    for key, item in items:
        found.update(named(item, f"{at}.{key}" if at else str(key)))
    return found


def _numbers(value: Any) -> torch.Tensor:
    tensor = torch.as_tensor(value).detach()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _distance(found: Any, want: Any) -> float:
    """The largest difference, of the largest magnitude that is wanted. Integers and strings: 0 or infinite."""
    if not isinstance(want, (torch.Tensor, float)):
        return 0.0 if found == want else float("inf")
    a, b = _numbers(found), _numbers(want)
    if a.shape != b.shape or (isinstance(found, torch.Tensor) and found.dtype != want.dtype):
        return float("inf")
    if b.numel() == 0:
        return 0.0
    if isinstance(want, torch.Tensor) and not (want.is_floating_point() or want.is_complex()):
        return 0.0 if torch.equal(a, b) else float("inf")
    same = (a == b) | (a.isnan() & b.isnan())
    difference = float(torch.where(same, 0.0, (a - b).abs()).nan_to_num(float("inf")).max())
    return difference / max(float(b.abs().nan_to_num(0.0, 0.0, 0.0).max()), 1e-6)


def _first_difference(found: Mapping[str, Any], want: Mapping[str, Any], bounds: Mapping[str, float]) -> str:
    """What is not equal, in words; "" where all is."""
    if list(found) != list(want):
        odd = sorted(set(found) ^ set(want))
        return f"other results: {', '.join(odd[:4]) or 'in another order'}"
    for at, value in want.items():
        distance = _distance(found[at], value)
        if not distance <= bounds[at]:
            return (
                f"{at} is off by {distance:.1e} of its size ({_shown(found[at])} instead of {_shown(value)})"
            )
    return ""


def _shown(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    numbers = ", ".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in value.flatten()[:3].tolist())
    return numbers + (", ..." if value.numel() > 3 else "")


Judge = Callable[[Case], Outcome]

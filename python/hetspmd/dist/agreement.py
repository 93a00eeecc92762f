"""What the ranks agree on before the first step: one plan, one seed, the same failures."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

from hetspmd.errors import HetspmdError, PlanError, PlanMismatchError
from hetspmd.plan.plan import Plan
from hetspmd.dist.communicator import Communicator


def agreed_plan(communicator: Communicator, make: Callable[[], Plan]) -> Plan:
    """The plan that rank 0 makes, on every rank.

    A HetspmdError on rank 0 is raised on every rank, with its class, message and attributes.
    """
    (plan,) = agreed_plans(communicator, lambda: {"": make()}).values()
    return plan


def agreed_plans(communicator: Communicator, make: Callable[[], dict[str, Plan]]) -> dict[str, Plan]:
    """The same of several plans, by name."""
    if communicator.world == 1:
        return make()
    own: dict[str, Plan] | None = None
    failure: HetspmdError | None = None
    message: tuple[str, str, Any] | None = None
    if communicator.rank == 0:
        try:
            own = make()
            message = ("plans", "", {key: plan.to_json() for key, plan in own.items()})
        except HetspmdError as error:
            failure = error
            message = ("error", str(error), _packed(error))
        except BaseException as error:
            message = ("error", f"rank 0 could not compile: {type(error).__name__}: {error}", b"")
            communicator.exchange(message)
            raise
    first = communicator.exchange(message)[0]
    if failure is not None:
        raise failure
    if own is not None:
        return own
    kind, text, content = first
    if kind == "error":
        raise _unpacked(text, content)
    return {key: Plan.from_json(plan, trial=False) for key, plan in content.items()}


def agreed_content(communicator: Communicator, make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on every rank. A HetspmdError on rank 0 is raised on every rank."""
    if communicator.world == 1:
        return make()
    failure: HetspmdError | None = None
    message: tuple[str, str, Any] | None = None
    if communicator.rank == 0:
        try:
            message = ("content", "", make())
        except HetspmdError as error:
            failure = error
            message = ("error", str(error), _packed(error))
        except BaseException as error:
            text = f"rank 0 could not trace: {type(error).__name__}: {error}"
            communicator.exchange(("error", text, b""))
            raise
    kind, text, content = communicator.exchange(message)[0]
    if failure is not None:
        raise failure
    if kind == "error":
        raise _unpacked(text, content)
    return content


def _packed(error: HetspmdError) -> bytes:
    """An error for other ranks; nothing of one that holds what cannot be sent."""
    try:
        return pickle.dumps(error)
    except Exception:
        return b""


def _unpacked(text: str, packed: bytes) -> HetspmdError:
    """The error of another rank; one that has its text alone, where this rank cannot have more."""
    try:
        error = pickle.loads(packed) if packed else None
    except Exception:
        error = None
    return error if isinstance(error, HetspmdError) else HetspmdError(text)


def loaded_plan(communicator: Communicator, plan: Plan | str | os.PathLike[str]) -> Plan:
    """The plan that every rank was given, or has read from its file.

    Raises on every rank PlanError if one of them cannot read it, PlanMismatchError if they hold different ones.
    """
    own: Plan | None = None
    failure: PlanError | None = None
    try:
        own = plan if isinstance(plan, Plan) else Plan.load(plan)
    except PlanError as error:
        failure = error
    outcomes = communicator.exchange(("", own.digest) if own is not None else (str(failure), ""))
    if failure is not None:
        raise failure
    for rank, (problem, _) in enumerate(outcomes):
        if problem:
            raise PlanError(f"rank {rank} cannot read its plan: {problem}")
    _check_same([digest for _, digest in outcomes])
    assert own is not None
    return own


def _check_same(digests: list[str]) -> None:
    if len(set(digests)) > 1:
        groups: dict[str, list[int]] = {}
        for rank, digest in enumerate(digests):
            groups.setdefault(digest[:12], []).append(rank)
        listed = "; ".join(f"{digest} on ranks {ranks}" for digest, ranks in groups.items())
        raise PlanMismatchError(
            f"the ranks hold different plans: {listed}; give every rank the same plan file"
        )

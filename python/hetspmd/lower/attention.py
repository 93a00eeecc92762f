"""Which attentions with dropout a rank may give to its fused kernels.

A kernel draws the mask for what it is given (:mod:`hetspmd.trace.gpu_dropout`). That is as good as the mask of
the op in parts where every rank computes samples or heads of its own, and where the gradient of an attention is
computed for the very samples and heads of which the rank has computed it: the state of the generator has passed
from the one to the other on the rank, neither by a collective nor as a slice. Elsewhere the op runs in parts,
whose mask is the same wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from hetspmd.placement import is_sharded
from hetspmd.program.buckets import Scheduled
from hetspmd.program.level_layout import LevelLayout, RankPlace
from hetspmd.program.levels import Both, NestedStep, carried, keys_of, rows_of
from hetspmd.program.program import Compute
from hetspmd.trace.dropout_attention import BACKWARD, FORWARD, STATE
from hetspmd.trace.gpu_dropout import fused_dropout_attention, fused_dropout_attention_backward
from hetspmd.trace.graph import Instruction

_OPS: Final = (FORWARD, BACKWARD)
_DROPOUT: Final = -3
"""The place of the probability among their arguments."""

KERNELS: Final[dict[str, Mapping[str, Callable[..., Any]]]] = {
    "cuda": {FORWARD: fused_dropout_attention, BACKWARD: fused_dropout_attention_backward}
}
"""By the type of the device and the op's name: what calls a fused kernel."""


def fused_attentions(
    layout: LevelLayout, at: RankPlace, steps: Iterable[Scheduled | NestedStep]
) -> frozenset[int]:
    """The attentions among the steps of a program, forward and backward, by instruction, that may be given to fused
    kernels."""
    found: set[int] = set()
    of_state: dict[int, set[tuple[int, ...]]] = {}
    instructions: dict[int, list[int]] = {}
    carried_on: set[int] = set()
    for step in steps:
        if not isinstance(step, (Compute, Both)):
            carried_on |= {source[0] for source, _ in carried(step)}
            continue
        instruction = layout.graph.instructions[step.instruction]
        if instruction.op in _OPS and not dropout_of(instruction):
            found.add(instruction.id)
        elif (key := _state(instruction, step)) is not None:
            of_state.setdefault(key[0], set()).add(key)
            instructions.setdefault(key[0], []).append(step.instruction)
    return frozenset(found).union(
        instruction
        for state, keys in of_state.items()
        if state not in carried_on and len(keys) == 1 and all(_is_own(layout, at, key) for key in keys)
        for instruction in instructions[state]
    )


def _state(instruction: Instruction, step: Compute | Both) -> tuple[int, ...] | None:
    """The state that an attention gives, or that its gradient reads, in its form."""
    rows = rows_of(step)
    if instruction.op == FORWARD:
        return keys_of(instruction.outputs, *(row.post for row in rows))[STATE]
    if instruction.op == BACKWARD:
        return keys_of(instruction.inputs, *(row.pre for row in rows))[-1]
    return None


def _is_own(layout: LevelLayout, at: RankPlace, key: tuple[int, ...]) -> bool:
    """Whether no two ranks, or micro-batches, have the same part of a value."""
    return all(is_sharded(form) or layout.peers(n, at)[1] == 1 for n, form in enumerate(key[1:]))


def dropout_of(instruction: Instruction) -> float:
    """The probability with which an attention drops."""
    probability = instruction.args[_DROPOUT]
    assert isinstance(probability, float), instruction.args
    return probability


def kernel_of(op: str, device: torch.device) -> Callable[..., Any] | None:
    """What calls a fused kernel of the device; None where there is none."""
    return KERNELS.get(device.type, {}).get(op)

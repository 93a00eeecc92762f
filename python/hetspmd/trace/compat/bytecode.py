"""What ``torch.compile`` of a user's code meets of hetspmd: calls that it leaves as they are.

A HAP module runs graphs of its own, with collectives in between, and an optimizer's hooks speak to other ranks.
A compiler that reads Python's bytecode would take them apart, each rank at places of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

REASON = (
    "hetspmd runs this step in graphs of its own, and torch.compile leaves it as it is; "
    "write HAP(model, cluster, example=..., compile=True) to compile them"
)
"""What torch says where it was told to compile without a break."""


def left_by_compilers(function: Callable[P, T]) -> Callable[P, T]:
    """A function that runs as it is written, with all that it calls, wherever ``torch.compile`` comes across it.

    torch's compiler is imported only if it is at work: that takes seconds.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        # While it reads this, the compiler takes the first for true, and need not know the second.
        if torch.compiler.is_compiling() or torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None:
            disable: Callable[..., Callable[P, T]] = torch.compiler.disable
            return disable(function, reason=REASON)(*args, **kwargs)
        return function(*args, **kwargs)

    # What torch's compiler reads of a function that it meets.
    vars(call).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=REASON)
    return call

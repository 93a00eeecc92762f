"""Settings on which a graph depends: torch's that decide its ops, and others if the user's code asks for them."""

from __future__ import annotations

import decimal
import sys
from collections.abc import Callable, Iterator, Set
from typing import Any, Final

import numpy as np
import torch

__all__ = ["SETTINGS", "counting"]


def _attribute(of: Any, name: str) -> Callable[[], Any]:
    def read() -> Any:
        try:
            return getattr(of, name)
        except RuntimeError:  # it was set in torch's older and in its newer way
            return "set in two ways"

    return read


_OF_THE_OPS: Final[dict[str, Callable[[], Any]]] = {
    ".default_dtype": torch.get_default_dtype,
    ".deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    ".flash_sdp": torch.backends.cuda.flash_sdp_enabled,
    ".mem_efficient_sdp": torch.backends.cuda.mem_efficient_sdp_enabled,
    ".math_sdp": torch.backends.cuda.math_sdp_enabled,
    ".cudnn": _attribute(torch.backends.cudnn, "enabled"),
}
"""Settings that decide of what ops a forward is made."""

_OF_A_RANK: Final = ("--local-rank", "--local_rank")
"""Arguments of a script by which launchers tell a rank which it is."""


def _arguments() -> list[str]:
    given = map(str, getattr(sys, "argv", ()))
    return [argument for argument in given if not argument.startswith(_OF_A_RANK)]


_IF_ASKED: Final[dict[str, tuple[frozenset[str], Callable[[], Any]]]] = {
    ".float32_matmul_precision": (
        frozenset({"get_float32_matmul_precision"}),
        torch.get_float32_matmul_precision,
    ),
    ".anomaly_mode": (frozenset({"is_anomaly_enabled"}), torch.is_anomaly_enabled),
    ".num_threads": (frozenset({"get_num_threads"}), torch.get_num_threads),
    ".num_interop_threads": (frozenset({"get_num_interop_threads"}), torch.get_num_interop_threads),
    ".warn_always": (frozenset({"is_warn_always_enabled"}), torch.is_warn_always_enabled),
    ".deterministic_warn_only": (
        frozenset({"is_deterministic_algorithms_warn_only_enabled", "get_deterministic_debug_mode"}),
        torch.get_deterministic_debug_mode,
    ),
    ".fill_uninitialized_memory": (
        frozenset({"fill_uninitialized_memory"}),
        _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
    ),
    ".cudnn_sdp": (frozenset({"cudnn_sdp_enabled"}), torch.backends.cuda.cudnn_sdp_enabled),
    ".cudnn.benchmark": (frozenset({"benchmark"}), _attribute(torch.backends.cudnn, "benchmark")),
    ".cudnn.deterministic": (frozenset({"deterministic"}), _attribute(torch.backends.cudnn, "deterministic")),
    ".cudnn.allow_tf32": (frozenset({"allow_tf32"}), _attribute(torch.backends.cudnn, "allow_tf32")),
    ".cuda.matmul.allow_tf32": (
        frozenset({"allow_tf32"}),
        _attribute(torch.backends.cuda.matmul, "allow_tf32"),
    ),
    ".numpy.geterr()": (frozenset({"geterr"}), lambda: sorted(np.geterr().items())),
    ".decimal.getcontext()": (frozenset({"getcontext", "localcontext"}), lambda: repr(decimal.getcontext())),
    ".sys.getrecursionlimit()": (frozenset({"getrecursionlimit"}), sys.getrecursionlimit),
    ".sys.argv": (frozenset({"argv"}), _arguments),
}
"""Other settings, each with the names by which code asks for it; those beside torch's have their module's name."""

SETTINGS: Final[dict[str, Callable[[], Any]]] = {
    **_OF_THE_OPS,
    **{step: read for step, (_, read) in _IF_ASKED.items()},
}
"""How each setting is read."""


def counting(names: Set[str]) -> Iterator[str]:
    """The settings on which a graph depends, if ``names`` are those in the user's code."""
    yield from _OF_THE_OPS
    yield from (step for step, (asking, _) in _IF_ASKED.items() if asking & names)

"""Settings on which a graph depends: torch's that decide its ops, and others if the user's code asks for them.

Each is read before every step. What is no number, flag or object that stays is read as text: a list that is made
anew each time would be taken for another one, and all that a plan depends on be looked at again.
"""

from __future__ import annotations

import decimal
import locale
import logging
import sys
from collections.abc import Callable, Iterator, Set
from typing import Any, Final

import numpy as np
import torch

from hetspmd.trace.compat.tensors import print_options
from hetspmd.trace.host.replaced import Replaced


def _attribute(of: Any, name: str) -> Callable[[], Any]:
    def read() -> Any:
        try:
            return getattr(of, name)
        except RuntimeError:  # it was set in torch's older and in its newer way
            return "set in two ways"

    return read


_METHODS: Final = Replaced(lambda: vars(torch.Tensor), lambda method: False)
"""Methods of torch's tensors. What packages do to them depends on which of them a rank has imported."""


def _levels() -> str:
    """Levels of logging, of all loggers that have one of their own."""
    manager = logging.root.manager
    loggers = (
        (name, logger)
        for name, logger in list(manager.loggerDict.items())
        if isinstance(logger, logging.Logger)
    )
    own = sorted(
        (name, logger.level, logger.disabled) for name, logger in loggers if logger.level or logger.disabled
    )
    return f"{manager.disable}, {logging.root.level}, {own}"


_OF_THE_OPS: Final[dict[str, Callable[[], Any]]] = {
    ".default_dtype": torch.get_default_dtype,
    ".deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    ".flash_sdp": torch.backends.cuda.flash_sdp_enabled,
    ".mem_efficient_sdp": torch.backends.cuda.mem_efficient_sdp_enabled,
    ".math_sdp": torch.backends.cuda.math_sdp_enabled,
    ".cudnn": _attribute(torch.backends.cudnn, "enabled"),
    ".Tensor": _METHODS.text,
}
"""Settings that decide of what ops a forward is made."""

_OF_A_RANK: Final = ("--local-rank", "--local_rank")
"""Arguments of a script by which launchers tell a rank which it is."""


def _arguments() -> str:
    arguments = map(str, getattr(sys, "argv", ()))
    return str([argument for argument in arguments if not argument.startswith(_OF_A_RANK)])


_IF_ASKED: Final[dict[str, tuple[frozenset[str], Callable[[], Any]]]] = {
    ".float32_matmul_precision": (
        frozenset({"get_float32_matmul_precision"}),
        torch.get_float32_matmul_precision,
    ),
    ".anomaly_mode": (frozenset({"is_anomaly_enabled"}), torch.is_anomaly_enabled),
    ".grad_enabled": (
        frozenset({"is_grad_enabled", "requires_grad", "grad_fn", "is_leaf"}),
        torch.is_grad_enabled,
    ),
    ".inference_mode": (
        frozenset({"is_inference_mode_enabled", "is_inference"}),
        torch.is_inference_mode_enabled,
    ),
    ".autocast_dtype": (
        frozenset({"get_autocast_dtype", "get_autocast_gpu_dtype", "get_autocast_cpu_dtype"}),
        lambda: str([torch.get_autocast_dtype(device) for device in ("cpu", "cuda")]),
    ),
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
    ".numpy.geterr()": (frozenset({"geterr"}), lambda: str(sorted(np.geterr().items()))),
    ".decimal.getcontext()": (frozenset({"getcontext", "localcontext"}), lambda: repr(decimal.getcontext())),
    ".sys.getrecursionlimit()": (frozenset({"getrecursionlimit"}), sys.getrecursionlimit),
    ".numpy.get_printoptions()": (
        frozenset({"get_printoptions", "array2string", "array_repr", "array_str"}),
        lambda: str(sorted(map(str, np.get_printoptions().items()))),
    ),
    ".logging": (frozenset({"isEnabledFor", "getEffectiveLevel", "level", "disabled"}), _levels),
    ".print options": (frozenset({"PRINT_OPTS"}), print_options),
    ".locale": (frozenset({"getlocale", "localeconv"}), lambda: locale.setlocale(locale.LC_ALL)),
    ".sys.argv": (frozenset({"argv"}), _arguments),
}
"""Other settings, each with the names by which code asks for it; those beside torch's have their module's name."""

_OFF_IN_A_TRACE: Final[dict[str, frozenset[str]]] = {
    "torch.is_autocast_cache_enabled()": frozenset({"is_autocast_cache_enabled"}),
    "torch.backends.mkldnn.enabled": frozenset({"mkldnn", "enabled"}),
}
"""What is switched off while a step is traced, each with the names by which code asks for it."""

SETTINGS: Final[dict[str, Callable[[], Any]]] = {
    **_OF_THE_OPS,
    **{step: read for step, (_, read) in _IF_ASKED.items()},
}
"""How each setting is read."""


def counting(names: Set[str]) -> Iterator[str]:
    """The settings on which a graph depends, if ``names`` are those in the user's code."""
    yield from _OF_THE_OPS
    yield from (step for step, (asking, _) in _IF_ASKED.items() if asking & names)


def asked_in_vain(names: Set[str]) -> Iterator[str]:
    """What user code with these ``names`` asks for that is switched off while a step is traced."""
    yield from (asked for asked, asking in _OFF_IN_A_TRACE.items() if asking <= names)

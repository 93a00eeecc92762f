"""Torch's settings of the process that a forward might change, which a plan would change on one rank alone.

That of oneDNN is not among them: each trace switches it off itself, for all threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch


class ProcessSettings:
    """The settings as they are now, to be compared and put back."""

    def __init__(self) -> None:
        self._held = {name: _read(read) for name, (read, _) in _SETTINGS.items()}

    def changes(self) -> Iterator[tuple[str, Any, Any]]:
        """What is another than it was: its name, what it was and what it is."""
        for name, before in self._held.items():
            now = _read(_SETTINGS[name][0])
            if now != before:
                yield f"torch's {name}", _spoken(before), _spoken(now)

    def rewind(self) -> None:
        """Put everything back."""
        for name, before in self._held.items():
            read, put = _SETTINGS[name]
            if before is not _UNKNOWN and _read(read) != before:
                put(*before if isinstance(before, tuple) else (before,))


_UNKNOWN: Final = object()
"""The value of a setting that torch does not tell here."""


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (RuntimeError, AttributeError, AssertionError):  # set in two ways, or of no backend here
        return _UNKNOWN


def _spoken(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def _attribute(of: Any, name: str) -> tuple[Callable[[], Any], Callable[..., object]]:
    return lambda: getattr(of, name), lambda value: setattr(of, name, value)


def _autocast(device: str) -> tuple[Callable[[], Any], Callable[..., object]]:
    def put(enabled: bool, dtype: torch.dtype) -> None:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)

    return lambda: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)), put


def _deterministic(enabled: bool, warn_only: bool) -> None:
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


_SETTINGS: Final[dict[str, tuple[Callable[[], Any], Callable[..., object]]]] = {
    "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "deterministic_algorithms": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _deterministic,
    ),
    "flash_sdp": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "mem_efficient_sdp": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    "math_sdp": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "cudnn_sdp": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    "cudnn": _attribute(torch.backends.cudnn, "enabled"),
    "cudnn.benchmark": _attribute(torch.backends.cudnn, "benchmark"),
    "cudnn.deterministic": _attribute(torch.backends.cudnn, "deterministic"),
    "cudnn.allow_tf32": _attribute(torch.backends.cudnn, "allow_tf32"),
    "cuda.matmul.allow_tf32": _attribute(torch.backends.cuda.matmul, "allow_tf32"),
    "default_device": (torch.get_default_device, _default_device),
    "autocast on the CPU": _autocast("cpu"),
    "autocast on CUDA": _autocast("cuda"),
}

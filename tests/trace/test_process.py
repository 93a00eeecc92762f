"""Settings of the process that forward changes are refused, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_plans import cluster

import hetspmd
from hetspmd.errors import TraceError
from hetspmd.trace.host.process import ProcessSettings
from hetspmd.trace.trace import trace
from nets import Net, parameter

X = torch.randn(4, 3)


def _default_device() -> None:
    torch.set_default_device("meta")


CHANGES: dict[str, Callable[[], Any]] = {
    "torch's float32_matmul_precision from highest to medium": lambda: torch.set_float32_matmul_precision("medium"),
    "torch's cudnn.benchmark from False to True": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "torch's cudnn.deterministic from False to True": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "torch's cudnn.allow_tf32 from True to False": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "torch's cudnn_sdp from True to False": lambda: torch.backends.cuda.enable_cudnn_sdp(False),
    "torch's deterministic_algorithms from False to True": lambda: torch.use_deterministic_algorithms(True),
    "torch's default_device from cpu to meta": _default_device,
    "torch's autocast on the CPU from False to True": lambda: torch.set_autocast_enabled("cpu", True),
}  # fmt: skip


@pytest.mark.parametrize("text", CHANGES)
def test_a_setting_that_forward_changes_is_refused_and_put_back(text: str) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        loss = (x * m.w).square().mean()
        CHANGES[text]()
        return loss

    before = ProcessSettings()
    with pytest.raises(
        TraceError, match=f"the forward of Net changes {text}; set it before the model is called"
    ):
        hetspmd.compile(Net(forward, w=parameter(3)), (X,), cluster(4, 2, 1, 1))
    assert not list(before.changes())


def test_a_setting_that_forward_puts_back_itself_is_none() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.backends.mkldnn.flags(enabled=True), torch.autocast("cpu", torch.bfloat16):
            return (x * m.w).square().mean()  # type: ignore[no-any-return]

    before = ProcessSettings()
    trace(Net(forward, w=parameter(3)), (X,), {})
    assert not list(before.changes())


def test_a_forward_that_fails_leaves_the_settings_as_they_were() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        torch.set_float32_matmul_precision("medium")
        raise ValueError("of the model")

    with pytest.raises(hetspmd.errors.HetspmdError, match="of the model"):
        trace(Net(forward, w=parameter(3)), (X,), {})
    assert torch.get_float32_matmul_precision() == "highest"

"""What CUDA's capturer asks of torch, with a stand-in for torch's side: there need be no GPU."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from hetspmd.run.capturer import CaptureError, CudaCapturer

REAL = inspect.signature(torch.cuda.graph.__init__)


class Cuda:
    """What was called, in order."""

    def __init__(self, patch: pytest.MonkeyPatch, ends_well: bool = True) -> None:
        self.calls: list[Any] = []
        said = self.calls.append

        class Stream:
            def __init__(self, name: str = "side") -> None:
                self.name = name

            def wait_stream(self, other: Stream) -> None:
                said(f"{self.name} waits for {other.name}")

        class Graph:
            def register_generator_state(self, generator: torch.Generator) -> None:
                said(("registered", generator))

            def replay(self) -> None:
                said("replayed")

        class Capturing:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                REAL.bind(self, *args, **kwargs)
                said(("begins", kwargs["pool"], kwargs["stream"].name, kwargs["capture_error_mode"]))

            def __enter__(self) -> None:
                pass

            def __exit__(self, *error: Any) -> None:
                said("ends")
                if not ends_well:
                    raise RuntimeError("operation failed due to a previous error during capture")

        for name, value in {
            "Stream": Stream,
            "CUDAGraph": Graph,
            "graph": Capturing,
            "graph_pool_handle": lambda: "pool",
            "current_stream": lambda device: Stream(f"{device}"),
            "device": lambda device: nullcontext(said(("on", str(device)))),
            "stream": lambda stream: nullcontext(said(f"on {stream.name}")),
        }.items():
            patch.setattr(torch.cuda, name, value)


def test_it_captures_on_its_stream_into_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    capturer = CudaCapturer(torch.device("cuda:1"))
    assert capturer.warm_up(lambda: cuda.calls.append("called") or 5) == 5
    pool = capturer.pool()
    assert pool == "pool"
    on, *warmed, beside = cuda.calls
    assert on == beside == ("on", "cuda:1")
    assert warmed == ["side waits for cuda:1", "on side", "called", "cuda:1 waits for side"]
    for number in range(2):
        cuda.calls.clear()
        generator = torch.Generator()
        capture = capturer.capture(lambda n=number: cuda.calls.append("called") or [n], (generator,), pool)
        begins = ("begins", "pool", "side", "thread_local")
        assert cuda.calls == [("registered", generator), ("on", "cuda:1"), begins, "called", "ends"]
        assert capture.outputs == [number]
        capture.replay()
        assert cuda.calls[-1] == "replayed"


def test_the_first_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a capture that was broken off says nothing of why."""
    Cuda(monkeypatch, ends_well=False)
    capturer = CudaCapturer(torch.device("cuda:0"))

    def call() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(CaptureError, match="not permitted when stream is capturing"):
        capturer.capture(call, (), capturer.pool())


def test_torch_has_what_is_asked_of_it() -> None:
    assert callable(torch.cuda.CUDAGraph.register_generator_state)
    assert callable(torch.cuda.CUDAGraph.replay)
    assert {"pool", "stream", "capture_error_mode"} <= set(REAL.parameters)

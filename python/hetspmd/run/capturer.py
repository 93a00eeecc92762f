"""What captures calls so that they can be repeated without Python: CUDA graphs, behind a small interface.

A capture has a memory of its own. Its *outputs* lie where they lay when the calls were captured, and each
repetition overwrites them; what the calls read is read where it lay. While a call is captured nothing is computed.
What CPUs can show of this is shown by :class:`~hetspmd.run.simulated_capture.SimulatedCapturer`.

:class:`CudaCapturer` has not run yet: there was no GPU. What is known of torch: before 2.13 a generator that
was named in a capture which failed raises an error when it is drawn from again, and the memory of freed tensors
is given back later.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class CaptureError(RuntimeError):
    """Something that cannot be captured."""


@dataclass(frozen=True)
class Capture:
    """Calls that were captured: ``replay()`` repeats them, ``outputs`` is what they returned."""

    outputs: Any
    replay: Callable[[], object]


class Capturer(ABC):
    """Captures calls on devices of one type, into pools of memory.

    What is captured into one pool must not be repeated at the same time. A later capture may have its outputs where
    an earlier one works, so that a repetition of the earlier one overwrites them.
    """

    device_type: str

    @abstractmethod
    def warm_up(self, call: Callable[[], T]) -> T:
        """Run ``call``, which is to be captured later, so that what happens once only has happened."""

    @abstractmethod
    def pool(self) -> Any:
        """A new pool of memory."""

    @abstractmethod
    def capture(self, call: Callable[[], Any], generators: Sequence[torch.Generator], pool: Any) -> Capture:
        """What ``call`` does, which draws from none but ``generators``: each repetition draws anew.

        Raises RuntimeError if it does what cannot be captured. Then nothing has happened.
        """


class CudaCapturer(Capturer):
    """CUDA graphs. Copies of one HAP module have one, as they have one set of plans."""

    device_type = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's Stream is

    def warm_up(self, call: Callable[[], T]) -> T:
        """On the stream on which it will be captured: libraries have workspaces per stream."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            outputs = call()
        current.wait_stream(self._stream)
        return outputs

    def pool(self) -> Any:
        with torch.cuda.device(self._device):
            return torch.cuda.graph_pool_handle()

    def capture(self, call: Callable[[], Any], generators: Sequence[torch.Generator], pool: Any) -> Capture:
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        # Threads that watch over collectives or load batches may call CUDA meanwhile.
        own: dict[str, Any] = {
            "pool": pool,
            "stream": self._stream,
            "capture_error_mode": "thread_local",
        }
        try:
            with warnings.catch_warnings(), torch.cuda.device(self._device), torch.cuda.graph(graph, **own):
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # of a rank without rows, say
                outputs = call()
        except RuntimeError as error:  # the end of a capture that was broken off raises another one
            raise CaptureError(str(error.__context__ or error)) from error
        return Capture(outputs, graph.replay)

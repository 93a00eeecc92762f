"""What each rank is counted to hold in a step, all ranks in one process, on links that are told when to be done.

The counter is that of the benches, the step that of the trust bench: forward, backward, AdamW. Buffers of a
collective are let go of once it is found to be complete. On a prompt link it is whenever a rank looks; on a late
one not until a rank waits for it, so that buffers are held for as long as the program allows. Neither depends on
how the ranks' threads happen to run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from emulated.memory import LiveBytes
from hetspmd.dist.communicator import Communicator, Work
from hetspmd.dist.simulated_world import SimulatedCommunicator, run_ranks
from hetspmd.lower import active_ranks
from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP
from trust.models import Built


class Prompt:
    """A primitive that is complete whenever somebody looks; it holds what it sends until then."""

    def __init__(self, work: Work, sent: object) -> None:
        self._work: Work | None = work
        self._sent = sent

    def wait(self) -> object:
        if self._work is not None:
            self._work.wait()
            self._work = self._sent = None
        return None

    def is_completed(self) -> bool:
        self.wait()
        return True


class Late(Prompt):
    """A primitive that is not complete until somebody waits for it."""

    def is_completed(self) -> bool:
        return self._work is None


class Quiet(SimulatedCommunicator):
    """What a network would compute is not counted on the rank that computes it here, nor what a rank has sent while
    others have not come to take it."""

    work: type[Prompt] = Prompt

    def _issue(
        self, kind: tuple[Any, ...], output: Any, value: Any, combine: Callable[[list[Any]], list[Any]]
    ) -> Work:  # fmt: skip
        def uncounted(parts: list[Any]) -> list[Any]:
            with _disable_current_modes():
                return combine(parts)

        with _disable_current_modes():
            apart = tree_map_only(torch.Tensor, torch.Tensor.clone, value)
        return self.work(super()._issue(kind, output, apart, uncounted), value)


def counted_bytes(plan: Plan, built: Built, link: type[Prompt] = Prompt) -> list[int]:
    """The most bytes that each rank holds in the second of two steps."""
    model, inputs = built
    models = [copy.deepcopy(model) for _ in active_ranks(plan)]
    _ = plan.theory, plan.digest

    def body(communicator: Communicator) -> int:
        assert isinstance(communicator, SimulatedCommunicator)
        own = Quiet(communicator.meeting, communicator.rank)
        own.work = link
        batch = {k: v.clone() for k, v in inputs.items()}
        with LiveBytes() as counter:
            hap = HAP(models[own.rank], plan.cluster, plan=plan, process_group=own, sync_module_states=False)
            optimizer = torch.optim.AdamW(hap.parameters(), lr=1e-4)
            for _ in range(2):
                counter.reset_peak()
                optimizer.zero_grad()
                torch.autograd.backward(hap(**batch))
                optimizer.step()
        return counter.peak

    return run_ranks(len(active_ranks(plan)), body)

"""What all plans of a HAP module have in common, and the mode in which its model is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hetspmd.cluster.cluster import Cluster
from hetspmd.dist.communicator import Communicator
from hetspmd.lower import LocalProgram, lower_plan
from hetspmd.optimize.compile_options import CompileOptions
from hetspmd.run.capturing import Capturing
from hetspmd.trace.autocast import autocast_state, without_autocast
from hetspmd.trace.graph import Graph

if TYPE_CHECKING:
    from hetspmd.plan.plan import Plan
    from hetspmd.trace.losses import Loss

Mode = tuple[tuple[bool, ...], tuple[bool, ...], str, int]
"""``training`` of every submodule, ``requires_grad`` of every parameter, the dtype of autocast ("": off),
the number of the model's structure (:mod:`hetspmd.run.structure`)."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a HAP module was given: everything that its plans have in common.

    ``communicator`` joins all ranks, idle ones too. ``options`` are those of its compilations,
    ``compile_options`` go to ``torch.compile`` (None: ops run as they are). ``capturing`` says what captures steps.
    """

    model: nn.Module
    cluster: Cluster
    device: torch.device
    communicator: Communicator
    gather_outputs: bool
    compile_options: Mapping[str, Any] | None
    capturing: Capturing
    options: CompileOptions

    @property
    def loss(self) -> Loss | None:
        """What finds the loss; None where the model's output tells it."""
        return self.options.find_loss

    @property
    def called(self) -> Callable[..., Any]:
        """What takes the batch: the model, or the loss with the model as its first argument."""
        return partial(self.loss, self.model) if callable(self.loss) else self.model

    def mode(self, structure: int) -> Mode:
        """The mode in which the model is now; ``structure`` is the number of its structure."""
        return (
            tuple(m.training for m in self.model.modules()),
            tuple(p.requires_grad for p in self.model.parameters()),
            autocast_state(self.device.type),
            structure,
        )

    def compile(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        training: bool,
        like: Plan | None = None,
        traced: Graph | None = None,
    ) -> Plan:
        """A plan of this batch in the present mode; ``like`` an earlier one, which keeps to its constraints.
        ``traced``: its graph, if there is one already."""
        from hetspmd.optimize.compiler import compile_plan

        options = self.options if like is None else replace(self.options, constraints=None)
        with self.communicator.busy():
            return compile_plan(
                self.model, args, kwargs, self.cluster, options, training=training, like=like, traced=traced
            )

    def lower(self, plan: Plan) -> LocalProgram:
        """The local graphs of this rank."""
        with without_autocast(self.device.type), self.communicator.busy():  # constants are computed here
            compiled = self.compile_options is not None
            return lower_plan(plan, self.communicator.rank, self.device, compiled=compiled)

"""How a HAP module begins: its ranks, its device, its first plan, and the runtime of that."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.machines import flat
from hetspmd.dist.agreement import agreed_plan, loaded_plan
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.machine_levels import join_machines
from hetspmd.dist.process_group import communicator_for
from hetspmd.dist.random import Randomness
from hetspmd.dist.runtime import LossScale, Runtime
from hetspmd.errors import DeviceError, ExampleError, OptionError, PlanMismatchError
from hetspmd.optimize.compile_options import CompileOptions
from hetspmd.plan.plan import Plan
from hetspmd.run.run_options import RunOptions
from hetspmd.run.same_options import check_same_options
from hetspmd.run.setting import Setting
from hetspmd.search.constraints import spelling
from hetspmd.trace.autocast import autocast_state
from hetspmd.trace.compat.joint import exporter
from hetspmd.trace.fake import model_device
from hetspmd.trace.trace import split_example


def joined(
    cluster: Cluster, run: RunOptions, compilation: CompileOptions, *, with_plan: bool
) -> Communicator:
    """The communicator of all ranks of the cluster, guarded against those that fail within ``run.timeout`` seconds.

    Raises WorldSizeError if the group has another number of ranks, and what :func:`check_same_options` raises.
    """
    group = run.process_group
    communicator = group if isinstance(group, Communicator) else communicator_for(group, cluster.ranks)
    communicator.guard(float(run.timeout))
    check_same_options(communicator, cluster, run, compilation, with_plan=with_plan)
    return communicator


def device_for(model: nn.Module, requested: torch.device | str | None) -> torch.device:
    """Where the model runs: on the device that was given, else where it lies. Raises DeviceError for a model that
    autocast would trace otherwise than it runs."""
    place = model_device(model)
    own = torch.device("cpu") if place.type == "meta" else place
    device = own if requested is None else torch.device(requested)
    if place.type == "meta" and device.type != "cpu" and autocast_state(device.type):
        raise DeviceError(
            "a model on the meta device is traced as on the CPU, which autocasts other ops than "
            f"{device.type}; make it there, with model.to_empty(device={str(device)!r})"
        )
    return device


def first_plan(setting: Setting, plan: Plan | str | os.PathLike[str] | None, example: Any) -> Plan:
    """The plan that was given, or one that is compiled for the example, the same on every rank.

    Raises PlanMismatchError for a plan of another cluster, ExampleError where neither was given, and OptionError
    for an option that a plan has settled: another number of micro-batches than the plan's, other constraints.
    """
    communicator = setting.communicator
    exporter()  # what a trace finds in torch's modules must be there on the ranks that do not trace, too
    if plan is not None:
        first = loaded_plan(communicator, plan)
        if first.cluster not in (setting.cluster, flat(setting.cluster)):
            raise PlanMismatchError("the plan was made for another cluster; compile one for this cluster")
        if setting.options.micro_batches not in (1, first.micro_batches):
            raise OptionError(
                f"micro_batches={setting.options.micro_batches} with a plan of {first.micro_batches}: the plan "
                "says how many; leave one of them out"
            )
        _check_settled(setting.options, first)
        return first
    if example is None:
        raise ExampleError("HAP needs example= (a batch to plan for) or plan=")
    args, kwargs = split_example(example)
    return agreed_plan(communicator, lambda: setting.compile(args, kwargs, training=True))


def _check_settled(options: CompileOptions, plan: Plan) -> None:
    """Raise OptionError for an option beside a plan, which has settled what it asks for."""
    usual = CompileOptions()
    settled = {
        "recompute": "says what is computed again",
        "zero": "says how parameters are stored",
        "segments": "says how many segments there are",
    }
    for name, says in settled.items():
        if (asked := getattr(options, name)) != getattr(usual, name):
            raise OptionError(f"{name}={asked!r} with a plan, which {says}; leave one of them out")
    forms = {
        glob: form if isinstance(form, str) else spelling(form)
        for glob, form in (options.constraints or {}).items()
    }
    if forms and forms != plan.constraints:
        raise OptionError(
            f"constraints={forms} with a plan that was made with {plan.constraints or None}; leave one of them "
            "out, or compile the plan with these"
        )


def runtime_of(
    communicator: Communicator, plan: Plan, randomness: Randomness, loss_scale: LossScale | None = None
) -> Runtime:
    """What this rank's graphs are given; all ranks must call this."""
    if plan.inside is None:
        runtime = Runtime.join(communicator, plan.active, randomness)
    else:
        runtime = join_machines(communicator, plan.cluster, plan.active, randomness)
    runtime.loss_scale = loss_scale
    return runtime

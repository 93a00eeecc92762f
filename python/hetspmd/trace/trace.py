"""Tracing: an unchanged model and an example batch become a :class:`~hetspmd.trace.graph.Graph`."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hetspmd.errors import (
    DeviceError,
    DroppedOutputWarning,
    ExampleError,
    HetspmdError,
    TraceError,
)
from hetspmd.trace.admissible import argument_names, check_leaf, check_model, spoken
from hetspmd.trace.advice import named_error
from hetspmd.trace.assemble import Naming, assemble
from hetspmd.trace.attention_calls import whole_attention
from hetspmd.trace.attention_rewrite import with_divisible_dropout
from hetspmd.trace.autocast import autocast_state
from hetspmd.trace.blocks import region_name
from hetspmd.trace.collector import collector_paused
from hetspmd.trace.compat.joint import export_joint, exporter, rehearsal
from hetspmd.trace.compat.tensors import fake_mode
from hetspmd.trace.compat.tied import merge_tied
from hetspmd.trace.compat.trees import flatten, flatten_with_names, spec_to_text
from hetspmd.trace.cumulative import cumulative_averages
from hetspmd.trace.decompositions import table
from hetspmd.trace.fake import fake_like, fake_parameters, model_device, trace_device
from hetspmd.trace.graph import Graph, Static
from hetspmd.trace.host.entropy import State
from hetspmd.trace.host.exact_types import warn_of_comparison
from hetspmd.trace.host.finish import with_host
from hetspmd.trace.host.recorder import Place
from hetspmd.trace.host.trials import settled, wants_trials
from hetspmd.trace.host.watch import HostRandomness, HostWatch
from hetspmd.trace.importer import import_graph
from hetspmd.trace.kept_results import check_kept
from hetspmd.trace.losses import Loss
from hetspmd.trace.recompute import Block, Chooser, own_regions, with_recomputation
from hetspmd.trace.recurrent import layer_by_layer
from hetspmd.trace.samples_first import with_samples_first
from hetspmd.trace.second_reads import with_second_reads
from hetspmd.trace.shared_memory import check_views
from hetspmd.trace.traced_step import Step


def split_example(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(args, kwargs)`` of an example: a mapping is keyword arguments, a tuple or list positional ones, a
    tensor the only argument. Raises ExampleError for anything else."""
    if isinstance(example, Mapping):
        if not all(isinstance(k, str) for k in example):
            raise ExampleError(f"the example's keys must be argument names, got {list(example)}")
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    if isinstance(example, torch.Tensor):
        return (example,), {}
    raise ExampleError(
        f"the example is a {type(example).__name__}; give a dict of keyword arguments or a tuple of positional ones"
    )


_ONE_AT_A_TIME = threading.RLock()
"""A trace patches what all threads share (torch.fx's patcher, torch.func's levels, the model's globals)."""


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    loss: Loss | None = None,
    training: bool = True,
    numbers: Sequence[Place] = (),
    host_randomness: HostRandomness = "refuse",
    states: list[State] | None = None,
    recompute: Chooser = own_regions,
) -> Graph:
    """The joint graph of one training step (or, with ``training=False``, of the forward alone).

    Only shapes and dtypes of parameters and batch are read, so both may be on the meta device. The model is
    traced in its current mode of ``train()`` / ``eval()`` and left as it was, and under the
    ``torch.autocast`` that surrounds the call, which the graph remembers. ``numbers`` are places of numbers
    on the model that are to be inputs of the graph, ``host_randomness`` is what becomes of random numbers
    that Python code draws (:mod:`hetspmd.trace.host`); ``states`` is filled with the states in which these
    draws leave the generators. ``recompute`` chooses the blocks that the backward computes again
    (:mod:`hetspmd.trace.blocks`): by default the model's own regions of torch.utils.checkpoint. Threads that trace
    wait for each other.

    Raises ExampleError if the batch does not fit the model, DeviceError if the model lies on several devices
    and TraceError if the step is not one static graph.
    """
    call = model, args, kwargs, loss
    exporter()  # imports are no part of what is watched
    with _ONE_AT_A_TIME, ExitStack() as stack:
        draws = [] if states is None else states
        graph, regions = _traced(*call, training, numbers, host_randomness, draws, stack)
    with collector_paused():
        graph, regions = with_samples_first(graph, regions)
        return with_second_reads(with_recomputation(graph, recompute(graph, regions)))


def _traced(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: Loss | None,
    training: bool,
    numbers: Sequence[Place],
    host_randomness: HostRandomness,
    states: list[State],
    stack: ExitStack,
) -> tuple[Graph, list[Block]]:
    """The joint graph, and the regions of torch.utils.checkpoint that the step has."""
    check_model(model)
    device, counted = model_device(model), cumulative_averages
    names = argument_names(model if loss is None else partial(loss, model), args)
    if loss is None:
        _check_signature(model, args, kwargs)
    batch = _batch(args, kwargs, names, device)
    place = trace_device(device)
    mode = fake_mode()
    fakes = [fake_like(mode, batch.leaves[i].detach(), place) for i in batch.tensors]
    watch = stack.enter_context(_watch(model, loss, (args, dict(kwargs)), numbers, host_randomness).leaving())
    fakes += [fake_like(mode, number, place) for number in watch.number_tensors()]
    faked = partial(fake_parameters, model, mode, place, gradients=training)
    step = Step(model, loss, batch.leaves, batch.spec, training=training, watch=watch)
    parameters, trainable = _names(model.named_parameters(remove_duplicate=False))
    buffers, _ = _names(model.named_buffers(remove_duplicate=False))
    first_names = {
        f"model.{name}": f"model.{names[0]}"
        for group in (parameters, buffers)
        for names in group.values()
        for name in names
    }
    grad_mode = _grad_mode(model, training)
    was_training, step.training = step.training, model.training
    try:
        with collector_paused(), faked(), grad_mode, _exchanged(model, place), watch.tracing():
            module, inputs, outputs = export_joint(step, fakes, table())
            inputs, outputs = merge_tied(module, inputs, outputs, first_names)
            draft = import_graph(with_divisible_dropout(module))
            outputs, watch.feeding = check_kept(draft, inputs, outputs, step.cached_outputs)
            watch.check_results()
            check_views(draft, outputs, trainable, watch)
    except HetspmdError:
        raise
    except Exception as error:
        raise named_error(error, model) from error
    finally:
        step.training = was_training
    naming = _naming(step, batch, watch, parameters, buffers, trainable if training else ())
    with collector_paused():
        graph, made = assemble(draft, inputs, outputs, naming)
        graph = with_host(graph, watch, [i for i in graph.inputs if i.leaf < 0], draft.data.values())
        if wants_trials(graph, watch):
            with faked(), grad_mode, counted(model), rehearsal(mode):
                graph = settled(graph, watch, partial(step.rehearsed, fakes[: len(batch.tensors)]))
    _warn(step, watch)
    states += watch.states
    graph = replace(graph, autocast=autocast_state(place.type))
    return graph, [Block(region_name(n), tensors) for n, tensors in step.checkpoints.whole(made).items()]


@contextmanager
def _exchanged(model: nn.Module, place: torch.device) -> Iterator[None]:
    """Within the context, functions of torch whose trace would be wrong, or slow, are others."""
    with layer_by_layer(model), whole_attention(place), cumulative_averages(model):
        yield


def _grad_mode(model: nn.Module, training: bool) -> AbstractContextManager[object]:
    """The mode in which a step is traced. A model of which nothing is trained runs with gradients enabled, where
    its forward may ask whether they are."""
    frozen = torch.is_grad_enabled() and not any(p.requires_grad for p in model.parameters())
    return nullcontext() if training or frozen else torch.no_grad()


def _naming(
    step: Step,
    batch: _Batch,
    watch: HostWatch,
    parameters: Mapping[str, tuple[str, ...]],
    buffers: Mapping[str, tuple[str, ...]],
    trainable: Iterable[str],
) -> Naming:
    """What the inputs and outputs of the graph are in the model's terms; ``trainable``: the parameters that get
    gradients."""
    try:
        output_spec = spec_to_text(step.output_spec)
        input_spec = spec_to_text(batch.spec)
    except (NotImplementedError, TypeError) as error:
        raise TraceError(f"a container of the batch or the output cannot be stored: {error}") from error
    return Naming(
        parameters={f"model.{k}": v for k, v in parameters.items()},
        buffers={f"model.{k}": v for k, v in buffers.items()},
        trainable=frozenset(f"model.{k}" for k in trainable),
        input_paths=[*(batch.paths[i] for i in batch.tensors), *watch.number_names()],
        input_leaves=[*batch.tensors, *(-1 for _ in watch.numbers)],
        statics=batch.statics,
        slots=step.slots,
        detached=step.detached,
        updates={i: f"model.{name}" for name, i in step.updates.items()},
        changed=step.changed,
        has_loss=step.has_loss,
        input_spec=input_spec,
        output_spec=output_spec,
        training=step.wants_gradients,
    )


@dataclass(frozen=True)
class _Batch:
    """The batch as a list of ``leaves`` with their ``paths``; ``tensors`` are the places of tensors among them, and
    ``statics`` the others."""

    leaves: list[Any]
    spec: Any
    paths: list[str]
    tensors: list[int]
    statics: tuple[Static, ...]


def _batch(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Mapping[str, str], device: torch.device
) -> _Batch:
    leaves, spec = flatten((args, dict(kwargs)))
    paths = [leaf_path(name) for name, _ in flatten_with_names((args, dict(kwargs)))]
    statics = []
    for i, leaf in enumerate(leaves):
        check_leaf(leaf, spoken(paths[i], names))
        if not isinstance(leaf, torch.Tensor):
            statics.append(Static(paths[i], i, leaf))
        elif leaf.device.type not in (device.type, "meta") and device.type != "meta":
            raise DeviceError(
                f"{spoken(paths[i], names)} is on {leaf.device}, the model on {device}; move one of them"
            )
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    return _Batch(leaves, spec, paths, tensors, tuple(statics))


def _warn(step: Step, watch: HostWatch) -> None:
    """Say what the graph does not do as the model does."""
    watch.asked.warn()
    watch.untrained.check()
    watch.untrained.warn()
    warn_of_comparison(watch.recorder.comparison)
    for path, kind in step.dropped.items():
        warnings.warn(
            f"output{path} is a {kind} and comes back as None: a cache is no result of a training step; pass "
            "use_cache=False, or set model.config.use_cache = False",
            DroppedOutputWarning,
            stacklevel=4,
        )


def _watch(
    model: nn.Module, loss: Loss | None, batch: object, numbers: Sequence[Place], randomness: HostRandomness
) -> HostWatch:
    try:
        return HostWatch(model, loss, batch, numbers=numbers, randomness=randomness)
    except HetspmdError:
        raise
    except Exception as error:  # the model's objects may raise anything when they are looked at
        raise named_error(error, model) from error


def leaf_path(name: str) -> str:
    """``[0][1]`` (positional) as ``args[1]``, ``[1]['x']`` (keyword) as ``x``."""
    if name.startswith("[0]"):
        return "args" + name[3:]
    rest = name[3:]
    head, _, tail = rest[1:].partition("]")
    return head.strip("'\"") + tail


def _names(named: Any) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    by_id: dict[int, list[str]] = {}
    trainable: list[str] = []
    for name, tensor in named:
        group = by_id.setdefault(id(tensor), [])
        group.append(name)
        if len(group) == 1 and tensor.requires_grad:
            trainable.append(name)
    return {names[0]: tuple(names) for names in by_id.values()}, trainable


def _check_signature(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ExampleError(
            f"the example does not fit {type(model).__name__}.forward: {error}; "
            f"it takes {inspect.signature(model.forward)}"
        ) from error

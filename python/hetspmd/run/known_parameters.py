"""Whether a wrapped model still has the parameters that its plan was made for, looked at before every step.

``half()``, ``p.data = ...`` of another shape, a layer that is put into the place of another: on one device each is
seen by the next call. A plan knows dtypes and shapes beforehand, so the next call names what has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_

import torch
from torch import nn

from hetspmd.errors import ShardError
from hetspmd.lower.local_program import LocalTensor
from hetspmd.run.shards import divided, mark, marked
from hetspmd.trace.compat.tensors import as_plain
from hetspmd.trace.values import dtype_name

Slot = tuple[nn.Module, str]
_Facts = tuple[torch.dtype, torch.Size, torch.device]


class KnownParameters:
    """The parameters that a plan reads, in its order: where they hang, and as what they were known.

    ``layouts`` are this rank's, by name; of a parameter without one the shape counts that it has now.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        slots: Sequence[Slot],
        layouts: Mapping[str, LocalTensor],
    ) -> None:
        self._names, self._slots, self._layouts = list(names), list(slots), layouts
        links = [
            (module._modules, key, f"{path}.{key}" if path else key)
            for path, module in model.named_modules()
            for key in module._modules
        ]
        self._places = [(modules, key) for modules, key, _ in links]
        self._paths = [path for _, _, path in links]
        self._children = [modules[key] for modules, key in self._places]
        self._parameters = [owner._parameters[leaf] for owner, leaf in slots]
        self.first = next((p for p in self._parameters if p is not None and p.requires_grad), None)
        self._facts = [_facts(p) for p in self._parameters]
        self._dtypes = [p.dtype for p in self._parameters if p is not None]
        self._shapes = [p.shape for p in self._parameters if p is not None]

    def now(self) -> list[torch.Tensor]:
        """The parameters as they are now. Raises ShardError if one is not what the plan was made for."""
        try:
            parameters = [owner._parameters[leaf] for owner, leaf in self._slots]
        except KeyError:
            parameters = [owner._parameters.get(leaf) for owner, leaf in self._slots]
        with as_plain():
            if not (
                all(map(is_, parameters, self._parameters))
                and [p.dtype for p in parameters] == self._dtypes  # type: ignore[union-attr]  # none is None
                and [p.shape for p in parameters] == self._shapes  # type: ignore[union-attr]  # none is None
                and [modules.get(key) for modules, key in self._places] == self._children
                and (not parameters or parameters[0].device == self._facts[0][2])  # type: ignore[union-attr, index]  # none is None
            ):
                self._look(parameters)
        return parameters  # type: ignore[return-value]  # none is None

    def _look(self, parameters: Sequence[nn.Parameter | None]) -> None:
        for (modules, key), child, path in zip(self._places, self._children, self._paths, strict=True):
            if modules.get(key) is not child:
                raise ShardError(
                    f"module {path} of the model was replaced after HAP(...), whose plan runs the old one; change "
                    "the model first and wrap it then"
                )
        for index, (name, parameter) in enumerate(zip(self._names, parameters, strict=True)):
            if parameter is None:
                raise ShardError(
                    f"the model has no parameter {name} any more, which the plan reads; change the model "
                    "(weight_norm, prune, ...) first and wrap it then"
                )
            if _facts(parameter) != self._facts[index]:
                raise ShardError(self._changed(name, parameter, self._facts[index]))
            layout, own = self._layouts.get(name), marked(parameter)
            if own is None and layout is not None and divided(layout):
                mark(parameter, name, layout)
            elif own is not None and (layout is None or _lies(own.layout) != _lies(layout)):
                raise ShardError(
                    f"{own}, and cannot stand for {name}, which lies otherwise; share it before HAP(...)"
                )
            self._parameters[index] = parameter

    def _changed(self, name: str, parameter: torch.Tensor, facts: _Facts | None) -> str:
        assert facts is not None, "a plan reads no parameter that there is not"
        dtype, shape, device = facts
        if parameter.dtype != dtype:
            return (
                f"parameter {name} is {dtype_name(parameter.dtype)} now, and {dtype_name(dtype)} in the plan; "
                "convert the model before HAP(...), or use torch.autocast"
            )
        if parameter.device != device:
            return f"parameter {name} is on {parameter.device} now; HAP runs on {device}: say HAP(..., device=...)"
        layout = self._layouts.get(name)
        whole = list(shape if layout is None else layout.shape)
        return (
            f"parameter {name} has shape {list(parameter.shape)} now, where this rank stores {list(shape)} of "
            f"{whole}; write hap.load_state_dict({{{name!r}: whole}}, strict=False) to change its values"
        )


def _facts(parameter: torch.Tensor | None) -> _Facts | None:
    return None if parameter is None else (parameter.dtype, parameter.shape, parameter.device)


def _lies(layout: LocalTensor) -> tuple[object, ...]:
    return layout.shape, layout.form, layout.extents, layout.region

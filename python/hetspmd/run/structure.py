"""Submodules and hooks of a model that a plan was made of: whether they are the same before a step.

A hook that is registered later, another activation module, or a ``forward`` that is replaced, of one module or of
its class, is another computation. Other parameters are not those that the plan's ranks share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hetspmd.errors import PlanMismatchError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def other_parameters(changed: Sequence[str]) -> PlanMismatchError:
    """The error of a model that has got or lost these parameters."""
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return PlanMismatchError(
        f"the model has other parameters than when HAP(...) was made: {', '.join(changed[:3])}{more}; change "
        "the model before it is wrapped, or wrap it anew: HAP(hap.module, ...) of a model that is whole"
    )


class StructureGuard:
    """Numbers the structures that a model has had; the first is 0."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = _parameter_names(model)
        self._known: list[tuple[Any, ...]] = []
        self.modules: list[nn.Module] = []
        self._lengths: list[tuple[Mapping[Any, Any], int]] = []
        self._contents: list[tuple[Mapping[Any, Any], tuple[Any, ...]]] = []
        self._forwards: list[tuple[nn.Module, Any, Any]] = []
        self._now = 0
        self._look()

    def number(self) -> int:
        """The number of the model's present structure. Raises PlanMismatchError if its parameters are
        others."""
        for held, length in self._lengths:
            if len(held) != length:
                return self._look()
        for held, contents in self._contents:
            if tuple(held.values()) != contents:
                return self._look()
        for module, own, common in self._forwards:
            if vars(module).get("forward") is not own or type(module).forward is not common:
                return self._look()
        return self._now

    def _look(self) -> int:
        names = _parameter_names(self._model)
        if names != self._names:
            raise other_parameters(sorted(set(names) ^ set(self._names)))
        self.modules = list(self._model.modules())
        self._lengths, self._contents, self._forwards = [], [], []
        facts: list[Any] = []
        for module in self.modules:
            own, common = vars(module).get("forward"), type(module).forward
            self._forwards.append((module, own, common))
            facts.append((id(module), _replaced(module, own), common))
            for name in ("_modules", *_HOOKS):
                held = vars(module)[name]
                contents = tuple(held.values())
                facts.append((id(module), name, tuple(c for c in contents if not _is_ours(c))))
                if contents:
                    self._contents.append((held, contents))
                else:
                    self._lengths.append((held, 0))
        structure = tuple(facts)
        if structure not in self._known:
            self._known.append(structure)
        self._now = self._known.index(structure)
        return self._now


def _is_ours(hook: object) -> bool:
    """Whether a hook is one by which HAP guards its shards."""
    return type(hook).__module__.startswith("hetspmd.")


def _replaced(module: nn.Module, own: Any) -> Any:
    """The function that stands in the place of a module's ``forward``; None where that of its class does."""
    plain = own.__wrapped__ if own is not None and _is_ours(own) else own
    return None if getattr(plain, "__func__", None) is type(module).forward else plain


def _parameter_names(model: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, _ in model.named_parameters(remove_duplicate=False))

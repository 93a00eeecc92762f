"""Hooks for state dicts that stand on the HAP module itself: torch's own calls do not come by them.

Those on the wrapped model and its parts are torch's matter, as ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


def before_saving(module: nn.Module, prefix: str) -> None:
    """Call the hooks before ``state_dict()``."""
    for hook in module._state_dict_pre_hooks.values():
        hook(module, prefix, False)


def after_saving(module: nn.Module, state: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Call the hooks after ``state_dict()``, of which some may return another one."""
    own = {"version": module._version}
    local = getattr(state, "_metadata", {}).get(prefix.removesuffix("."), own)
    for hook in module._state_dict_hooks.values():
        answer = hook(module, state, prefix, local)
        if answer is not None and getattr(hook, "_from_public_api", False):
            raise RuntimeError("state_dict post-hook must return None")
        state = state if answer is None else answer
    return state


def loaded_with_hooks(
    module: nn.Module, state: Mapping[str, Any], strict: bool, load: Callable[[Mapping[str, Any], bool], Any]
) -> Any:
    """``load(state, strict)`` with the hooks around it, which may change keys and the report."""
    if not module._load_state_dict_pre_hooks and not module._load_state_dict_post_hooks:
        return load(state, strict)
    entries = OrderedDict(state)
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        entries._metadata = versions  # type: ignore[attr-defined]  # as torch's own state dicts have it
    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []
    for before in module._load_state_dict_pre_hooks.values():
        before(entries, "", (versions or {}).get("", {}), strict, missing, unexpected, errors)
    report = load(entries, False)
    report.missing_keys.extend(missing)
    report.unexpected_keys.extend(unexpected)
    for after in module._load_state_dict_post_hooks.values():
        after(module, report)
    if strict:
        for what, keys in (("Unexpected", report.unexpected_keys), ("Missing", report.missing_keys)):
            if keys:
                errors.append(f"{what} key(s) in state_dict: " + ", ".join(f'"{key}"' for key in keys))
    if errors:
        raise RuntimeError("Error(s) in loading state_dict for HAP:\n\t" + "\n\t".join(errors))
    return report


@contextmanager
def without_pre_hooks(module: nn.Module) -> Iterator[None]:
    """Within the context the hooks before loading are not there: they have been called."""
    own = vars(module)
    saved, own["_load_state_dict_pre_hooks"] = own["_load_state_dict_pre_hooks"], OrderedDict()
    try:
        yield
    finally:
        own["_load_state_dict_pre_hooks"] = saved

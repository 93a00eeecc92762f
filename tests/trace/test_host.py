"""A trace leaves a model, generators and what functions read as they were; what it finds is in the graph."""

from __future__ import annotations

import copy
import functools
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hetspmd.errors import HetspmdError, TraceError
from hetspmd.run.host_guard import Guard
from hetspmd.trace.compat.tensors import is_traced
from hetspmd.trace.graph import Graph
from hetspmd.trace.host.discovery import discover
from hetspmd.trace.host.equal import differ_in_numbers, digest
from hetspmd.trace.host.foreign import is_installed
from hetspmd.trace.host.places import Roots
from hetspmd.trace.host.plain import fingerprint
from hetspmd.trace.host.steps import key_of, step_to
from hetspmd.trace.host.templates import from_text, to_text
from hetspmd.trace.trace import trace
from nets import Net, parameter

SCALE = 1.0
KEPT: dict[str, Any] = {}
X = torch.randn(4, 3)


def scaled(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (x * m.w).square().mean() * SCALE


def keeps_outside(m: Any, x: torch.Tensor) -> torch.Tensor:
    KEPT["x"] = x * m.w
    return (x * m.w).square().mean()


@functools.lru_cache
def table(size: int) -> torch.Tensor:
    return torch.arange(float(size))


def cached(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (x * m.w * table(3)).square().mean()


def everything(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.calls += 1
    m.last = x * m.w
    m.items["mean"] = m.last.mean()
    m.late = x.shape[0]
    del m.gone
    return m.last.square().mean()


def breaks(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.last = x * m.w
    m.items["x"] = m.last
    raise ValueError("of the model")


def adds_a_hook(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.layer.register_forward_hook(lambda *_: None)
    return m.layer(x).square().mean() * m.w.sum()


def model(forward: Any) -> Net:
    return Net(forward, w=parameter(3), layer=nn.Linear(3, 3), calls=0, last=None, items={}, gone=1)


def guard(graph: Graph, net: nn.Module) -> Guard:
    roots = Roots(net)
    discover(roots)
    return Guard(graph, roots, torch.device("cpu"), 1)


@pytest.mark.parametrize("forward", [scaled, keeps_outside, cached, everything, breaks, adds_a_hook])
def test_a_trace_leaves_everything_as_it_was(forward: Any) -> None:
    net = model(forward)
    before = {name: dict(vars(module)) for name, module in net.named_modules()}
    inside = {name: (dict(m._parameters), list(m._forward_hooks.items())) for name, m in net.named_modules()}
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # global
    refused = False
    try:
        trace(net, (X,), {})
    except HetspmdError:
        refused = True
    assert refused == (forward in (breaks, adds_a_hook))
    for name, module in net.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert all(vars(module)[k] is v for k, v in before[name].items())
        assert (dict(module._parameters), list(module._forward_hooks.items())) == inside[name]
    assert (net.items, KEPT) == ({}, {})
    assert not is_traced(table(3))
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # global
    assert torch.equal(torch.get_rng_state(), states[2])


def of_one_name(one: float, two: float, three: float) -> list[Any]:
    made = [(lambda x, by=by: x * by * one) for by in (two, three)]
    return [lambda x: x * one, lambda x: x - two, lambda x: x / three, *made]


def test_functions_of_a_set_have_the_same_names_on_every_rank() -> None:
    """A set's order comes of addresses, which are others in each process: here of many sets that live at once."""
    functions = [of_one_name(1.0, 2.0, 3.0) for _ in range(64)]
    found = set()
    for each in functions:
        net = model(scaled)
        net.functions = set(each)
        roots = Roots(net)
        discover(roots)
        found.add(tuple((root, each.index(f)) for root, f in roots.functions.items() if f in each))
    assert len(found) == 1
    assert len(*found) == 5


def test_globals_and_variables_of_closures_are_read() -> None:
    global SCALE
    factor = 2.0

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return scaled(m, x) * factor

    net = model(forward)
    graph = trace(net, (X,), {})
    assert guard(graph, net).holds()
    SCALE = 3.0
    assert not guard(graph, net).holds()
    SCALE = 1.0
    found = guard(graph, net)
    assert found.holds()
    factor = 5.0
    assert not found.holds()
    assert [read.path for read, _ in found.differences()] == [(".factor",)]


@pytest.mark.parametrize(
    ("change", "back"),
    [
        (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
        (
            lambda: torch.use_deterministic_algorithms(True, warn_only=True),
            lambda: torch.use_deterministic_algorithms(False),
        ),
        (
            lambda: torch.backends.cuda.enable_flash_sdp(False),
            lambda: torch.backends.cuda.enable_flash_sdp(True),
        ),
    ],
)
def test_settings_of_torch_are_part_of_a_plan(change: Any, back: Any) -> None:
    net = model(scaled)
    found = guard(trace(net, (X,), {}), net)
    try:
        change()
        assert not found.holds()
    finally:
        back()
    assert found.holds()


@pytest.mark.parametrize(
    ("leak", "text"),
    [
        (lambda: torch.set_grad_enabled(False), "leaves gradients switched off"),
        (lambda: torch.set_default_dtype(torch.float64), "changes torch's default_dtype from torch.float32"),
    ],
)
def test_settings_that_leak_out_of_forward_are_refused(leak: Any, text: str) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (x * m.w).square().mean()
        leak()
        return loss

    with pytest.raises(TraceError, match=text):
        trace(model(forward), (X,), {})
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


def test_gradients_that_are_off_inside_are_off() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = (x * m.w).mean()
        return (x * m.w).square().mean() * scale

    def detached(m: Any, x: torch.Tensor) -> torch.Tensor:
        scale = (x * m.w).mean().detach()
        return (x * m.w).square().mean() * scale

    def attached(m: Any, x: torch.Tensor) -> torch.Tensor:
        scale = (x * m.w).mean()
        return (x * m.w).square().mean() * scale

    found = [digest(trace(model(f), (X,), {})) for f in (forward, detached, attached)]
    assert found[0] == found[1] != found[2]


def test_a_number_as_an_input_is_the_same_graph() -> None:
    net = model(lambda m, x: (1 - m.calls) * (x * m.w).square().mean() / m.items["k"])
    net.calls, net.items["k"] = 0.25, 3.0
    numbers = (("model", (".calls",)),)
    plain, other = trace(net, (X,), {}), trace(net, (X,), {}, numbers=numbers)
    (number,) = other.host.numbers
    assert differ_in_numbers(plain, other, {number.tensor: 0.25})
    assert not differ_in_numbers(plain, other, {number.tensor: 0.5})


def test_an_iterator_is_refused() -> None:
    net = model(lambda m, x: (x * m.w).mean() * next(m.stream))
    net.stream = iter([1.0, 2.0])
    with pytest.raises(TraceError, match=r"stream of Net at .*test_host.py:\d+, a list_iterator"):
        trace(net, (X,), {})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0), (1, True), (0.0, -0.0), ((1,), [1]), ({"a": 1}, {"a": 2}), (torch.float32, torch.float64),
        (torch.ones(2), torch.zeros(2)), (np.ones(2), np.zeros(2)), (nn.ReLU(), nn.GELU()), ("None", None),
    ],
)  # fmt: skip
def test_fingerprints_tell_values_apart(one: Any, other: Any) -> None:
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(copy.deepcopy(one))


def test_values_are_made_again_from_their_text() -> None:
    tensor = torch.ones(2)
    value = {
        "a": [1, 2.5, (None, True)],
        3: {float("inf")},
        "t": tensor,
        "d": torch.float16,
        "s": torch.Size([2]),
    }
    made = from_text(to_text(value, lambda t: 7), lambda number: tensor if number == 7 else torch.zeros(1))
    assert made == value


@pytest.mark.parametrize("key", [0, -1, "x", 'quo"te]', 2.5, True, None, (1, ("a", None))])
def test_steps_to_items(key: Any) -> None:
    assert key_of(step_to(key)) == key


def test_what_pip_has_put_into_a_folder_is_installed_and_what_lies_beside_it_is_not(tmp_path: Path) -> None:
    info = tmp_path / "its-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: its\nVersion: 1.0\n", encoding="utf-8")
    (info / "RECORD").write_text("its/__init__.py,,\nits/inner.py,,\nalone.py,,\n", encoding="utf-8")

    (tmp_path / "its").mkdir()
    for name in ("its/__init__.py", "its/inner.py", "alone.py"):
        (tmp_path / name).touch()

    assert is_installed(module("its", tmp_path / "its/__init__.py"))
    assert is_installed(module("its.inner", tmp_path / "its/inner.py"))
    assert is_installed(module("alone", tmp_path / "alone.py"))
    assert not is_installed(module("mine", tmp_path / "mine.py"))
    assert not is_installed(module("mine.inner", tmp_path / "mine/inner.py"))
    assert not is_installed(ModuleType("without_a_file"))
    assert is_installed(pytest)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("mine", "mine/__init__.py"),
        ("mine.net", "mine/net.py"),
        ("mine.deep.net", "mine/deep/net.py"),
        ("single", "single.py"),
    ],
)
def test_a_users_own_package_that_pip_has_linked_is_not_installed(
    tmp_path: Path, name: str, file: str
) -> None:
    """``pip install -e .`` leaves an egg-info, with the sources' names, beside a user's package."""
    info = tmp_path / "src" / "mine.egg-info"
    info.mkdir(parents=True)
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 0.1\n", encoding="utf-8")
    sources = "setup.py\nmine/__init__.py\nmine/net.py\nmine/deep/net.py\nsingle.py\nsrc/mine/net.py\n"
    (info / "SOURCES.txt").write_text(sources, encoding="utf-8")
    (info / "top_level.txt").write_text("mine\nsingle\n", encoding="utf-8")
    assert not is_installed(module(name, tmp_path / "src" / file))


def test_a_folder_that_is_only_called_alike_is_a_users(tmp_path: Path) -> None:
    assert not is_installed(module("mine", tmp_path / "my-site-packages" / "mine.py"))
    assert is_installed(module("its", tmp_path / "site-packages" / "its.py"))


def module(name: str, file: Path) -> ModuleType:
    """A module as if it had been imported from a file."""
    made = ModuleType(name)
    made.__file__ = str(file)
    return made

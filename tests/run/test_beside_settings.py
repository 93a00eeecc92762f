"""Settings of torch and of the environment that forward asks for, and others change between steps."""

from __future__ import annotations

import copy
import decimal
import locale
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from beside import Beside, X, base, equal
from ranks import cluster

from hetspmd.dist.simulated_world import run_ranks
from hetspmd.run.host_guard import Guard
from hetspmd.run.module import HAP
from hetspmd.trace.host import settings

pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning")

KEY = ["SCALE", "OF", "STEPS"]


def environment(value: object) -> None:
    os.environ["HETSPMD_TEST_SCALE_OF_STEPS"] = "2" if value else "1"


def argument(value: object) -> None:
    sys.argv = ["script", *(["--of-this-test"] if value else [])]


LOGGER = logging.getLogger("hetspmd.tests.settings")
SETTINGS: dict[str, tuple[Callable[[], bool], Callable[[bool], object]]] = {
    "precision of products": (
        lambda: torch.get_float32_matmul_precision() == "high",
        lambda on: torch.set_float32_matmul_precision("high" if on else "highest"),
    ),
    "benchmark of cuDNN": (
        lambda: torch.backends.cudnn.benchmark,
        lambda on: setattr(torch.backends.cudnn, "benchmark", on),
    ),
    "determinism of cuDNN": (
        lambda: torch.backends.cudnn.deterministic,
        lambda on: setattr(torch.backends.cudnn, "deterministic", on),
    ),
    "memory": (
        lambda: not torch.utils.deterministic.fill_uninitialized_memory,
        lambda on: setattr(torch.utils.deterministic, "fill_uninitialized_memory", not on),
    ),
    "errors of numpy": (
        lambda: np.geterr()["under"] == "raise",
        lambda on: np.seterr(under="raise" if on else "ignore"),
    ),
    "precision of decimals": (
        lambda: decimal.getcontext().prec == 9,
        lambda on: setattr(decimal.getcontext(), "prec", 9 if on else 28),
    ),
    "recursion": (
        lambda: sys.getrecursionlimit() > 1500,
        lambda on: sys.setrecursionlimit(2000 if on else 1000),
    ),
    "arguments": (lambda: "--of-this-test" in sys.argv, argument),
    "levels of logging": (
        lambda: LOGGER.isEnabledFor(logging.DEBUG),
        lambda on: LOGGER.setLevel(logging.DEBUG if on else logging.INFO),
    ),
    "level of all loggers": (
        lambda: not LOGGER.isEnabledFor(logging.ERROR),
        lambda on: logging.disable(logging.CRITICAL if on else logging.NOTSET),
    ),
    "level by its own name": (
        lambda: LOGGER.level == logging.DEBUG,
        lambda on: LOGGER.setLevel(logging.DEBUG if on else logging.INFO),
    ),
    "locale": (
        lambda: locale.getlocale(locale.LC_CTYPE)[1] == "UTF-8",
        lambda on: locale.setlocale(locale.LC_CTYPE, "C.UTF-8" if on else "C"),
    ),
    "print options": (
        lambda: len(np.array2string(np.array([1.0 / 3.0]))) < 9,
        lambda on: np.set_printoptions(precision=2 if on else 8),
    ),
    "torch's print options": (
        lambda: torch._tensor_str.PRINT_OPTS.precision == 2,
        lambda on: torch.set_printoptions(precision=2 if on else 4),
    ),
    "anomaly mode": (lambda: torch.is_anomaly_enabled(), torch.autograd.set_detect_anomaly),
    "warnings": (torch.is_warn_always_enabled, torch.set_warn_always),
    "dtype of autocast, which is off": (
        lambda: torch.get_autocast_dtype("cpu") == torch.float16,
        lambda on: torch.set_autocast_dtype("cpu", torch.float16 if on else torch.bfloat16),
    ),
    "environment by a computed name": (
        lambda: os.environ["HETSPMD_TEST_" + "_".join(KEY)] == "2",
        environment,
    ),
    "environment by the end of a name": (
        lambda: os.environ["".join(["HETSPMD", "_TEST_"]) + "SCALE_OF_STEPS"] == "2",
        environment,
    ),
}
OF_A_THREAD = (
    "errors of numpy",
    "precision of decimals",
    "print options",
    "dtype of autocast, which is off",
)
SHARED = [False]
"""What was set last: the threads of the ranks share it, and the first of them sets it."""


@pytest.fixture(params=SETTINGS)
def setting(request: pytest.FixtureRequest) -> Iterator[str]:
    put = SETTINGS[request.param][1]
    SHARED[0] = False
    arguments, depth, errors = sys.argv, sys.getrecursionlimit(), np.geterr()
    level, places = LOGGER.level, locale.setlocale(locale.LC_CTYPE)
    put(False)
    yield request.param
    put(False)
    LOGGER.setLevel(level)
    locale.setlocale(locale.LC_CTYPE, places)
    sys.argv = arguments
    sys.setrecursionlimit(depth)
    np.seterr(**errors)
    os.environ.pop("HETSPMD_TEST_SCALE_OF_STEPS", None)


def test_what_forward_asks_for_is_noticed(setting: str) -> None:
    ask, put = SETTINGS[setting]

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        return base(model, x) * (2.0 if ask() else 1.0)

    def each(_: Any, step: int) -> None:
        if SHARED[0] != (step > 1) or setting in OF_A_THREAD:
            SHARED[0] = step > 1
            put(step > 1)

    losses = equal(lambda: Beside(forward), each, plans=2).losses
    assert losses[2] > 1.5 * losses[1], "the step must read it"


MODES: dict[str, Callable[[torch.Tensor], bool]] = {
    "inference": lambda _: torch.is_inference_mode_enabled(),
    "a tensor of inference": lambda hidden: hidden.is_inference(),
    "no gradients": lambda _: not torch.is_grad_enabled(),
    "a tensor without gradient": lambda hidden: not hidden.requires_grad,
    "a tensor without history": lambda hidden: hidden.grad_fn is None,
}


def equal_losses(model: Beside, body: Callable[[Any], list[float]]) -> list[float]:
    """Assert that all ranks get the losses that ``body`` gets on one device; returns these."""
    models = [copy.deepcopy(model) for _ in range(4)]
    want = body(model)

    def rank(communicator: Any) -> list[float]:
        devices = cluster(4, 2, 1, 1)
        return body(HAP(models[communicator.rank], devices, example=(X,), process_group=communicator))

    for losses in run_ranks(4, rank):
        assert losses == pytest.approx(want, rel=1e-5)
    return want


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("name", MODES)
def test_a_mode_of_torch_is_another_state_for_who_asks_for_it(name: str, evaluation: bool) -> None:
    """In training and in evaluation. What a forward asks is found in its code: it has this question alone."""
    ask = MODES[name]

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        return base(model, x) * (2.0 if ask(model.up(x)) else 1.0)

    def body(called: Any) -> list[float]:
        called.train(not evaluation)
        found = []
        modes = (torch.enable_grad, torch.no_grad, torch.inference_mode)
        for mode in (*modes, *modes[::-1]):
            with mode():
                found.append(float(called(X).detach()))
        return found

    want = equal_losses(Beside(forward), body)
    assert want[2] > 1.5 * want[0]


@pytest.mark.parametrize("name", ["no gradients", "inference"])
def test_a_frozen_model_is_asked_in_its_own_mode(name: str) -> None:
    """Nothing is trained from the second call on, so that a step is a forward alone, and gradients are enabled all
    the same."""
    ask = MODES[name]

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        return base(model, x) * (2.0 if ask(x) else 1.0)

    def body(called: Any) -> list[float]:
        losses = [float(called(X).detach())]
        called.requires_grad_(False)
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                losses.append(float(called(X).detach()))
        return losses

    want = equal_losses(Beside(forward), body)
    assert want[3] > 1.5 * want[0]


def test_what_forward_does_not_ask_for_makes_no_plan() -> None:
    before = torch.backends.cudnn.benchmark
    try:
        equal(
            lambda: Beside(base),
            lambda _, step: setattr(torch.backends.cudnn, "benchmark", step > 1),
            plans=1,
        )
    finally:
        torch.backends.cudnn.benchmark = before


def test_what_stays_the_same_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that is another object each time it is read would have every step look at all that a plan reads."""
    kinds = (str, int, float, torch.dtype)
    assert not [step for step, read in settings.SETTINGS.items() if not isinstance(read(), kinds)]
    bound: list[Guard] = []
    bind = Guard._bind
    monkeypatch.setattr(Guard, "_bind", lambda guard: (bound.append(guard), bind(guard)))
    hap = HAP(Beside(base), cluster(1), example=(X,))
    for _ in range(4):
        hap(X)
    assert len(bound) == 1

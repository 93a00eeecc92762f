"""What forward leaves on the model is this rank's rows where the program divides it, and is warned of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from beside import Beside, X, train

from hetspmd.errors import KeptRowsWarning


def _attribute(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.last = model.up(x).detach()
    return model.down(model.up(x)).square().mean()


def _differentiated(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.last = model.up(x)
    return model.down(model.last).square().mean()


def _of_a_part(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.up.seen = torch.tanh(model.up(x)).detach()
    return model.down(model.up(x)).square().mean()


def _in_a_dict(model: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = model.up(x)
    model.items["hidden"], model.items["mean"] = hidden.detach(), hidden.mean().detach()
    return model.down(hidden).square().mean()


def _in_a_list(model: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = model.up(x)
    model.layers = [hidden.detach(), model.down(hidden).detach()]
    return model.down(hidden).square().mean()


def _in_a_tuple(model: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = model.up(x)
    model.pair = (3, hidden.detach())
    return model.down(hidden).square().mean()


def _by_a_hook(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.down(model.up(x)).square().mean()


def hooked(model: Beside) -> Beside:
    model.up.register_forward_hook(lambda module, given, found: setattr(module, "activation", found.detach()))
    return model


KEPT: dict[str, tuple[Any, dict[str, Any], Callable[[Any], torch.Tensor], str]] = {
    "an attribute": (_attribute, {"last": None}, lambda m: m.last, "last"),
    "part of a graph": (_differentiated, {"last": None}, lambda m: m.last.detach(), "last"),
    "of a part": (_of_a_part, {}, lambda m: m.up.seen, "up.seen"),
    "in a dict": (_in_a_dict, {"items": {}}, lambda m: m.items["hidden"], 'items["hidden"]'),
    "in a list": (_in_a_list, {"layers": []}, lambda m: torch.cat(m.layers, 1), "layers"),
    "in a tuple": (_in_a_tuple, {"pair": None}, lambda m: m.pair[1], "pair"),
    "by a hook": (_by_a_hook, {}, lambda m: m.up.activation, "up.activation"),
}


def made(name: str) -> Callable[[], Beside]:
    forward, members, _, _ = KEPT[name]
    return lambda: hooked(Beside(forward, **members)) if name == "by a hook" else Beside(forward, **members)


@pytest.mark.parametrize("name", KEPT)
def test_rows_are_warned_of_once(name: str) -> None:
    _, _, look, place = KEPT[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", KeptRowsWarning)
        single, ranks = train(made(name), look=look, steps=3)
    (text,) = (str(w.message) for w in caught if w.category is KeptRowsWarning)
    assert text.startswith(f"{place}, which forward leaves on the model, has this rank's rows")
    assert "HAP(..., gather_outputs=True)" in text
    rows = torch.cat([rank.seen for rank in ranks])
    torch.testing.assert_close(rows, single.seen, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", KEPT)
def test_gathered_they_are_whole(name: str) -> None:
    _, _, look, _ = KEPT[name]
    single, ranks = train(made(name), look=look, gather_outputs=True)
    for rank in ranks:
        torch.testing.assert_close(rank.seen, single.seen, rtol=1e-5, atol=1e-6)


def test_what_is_whole_is_not_warned_of() -> None:
    def keep(model: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = model.up(x)
        model.mean, model.weight, model.rows = hidden.mean(0).detach(), model.up.weight.detach() * 2, len(x)
        return model.down(hidden).square().mean()

    single, ranks = train(lambda: Beside(keep), look=lambda m: m.mean)
    for rank in ranks:
        torch.testing.assert_close(rank.seen, single.seen, rtol=1e-5, atol=1e-6)
    assert len(X) == 16

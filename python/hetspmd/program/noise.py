"""Random ops as noise and the arithmetic around it, so that a slice of what one device draws can be had.

Where the numbers that an op draws depend on no tensor (``exponential``, ``randint``) the noise is what torch
draws. ``poisson`` and ``binomial`` invert their distribution at uniform noise, ``multinomial`` takes the
largest of ``p / e`` with exponential e, or inverts the distribution where it draws with replacement: the same
distributions, other numbers than torch's. These are used where a slice of what all draw is wanted, and nowhere
else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def _shape(shape: tuple[int, ...], *args: Any, **kwargs: Any) -> tuple[int, ...]:
    return shape


@dataclass(frozen=True)
class Noise:
    """An op as noise and arithmetic.

    ``fill(flat, generator, *args, **kwargs)`` overwrites a flat tensor with noise, ``finish(noise, *args,
    **kwargs)`` gives the op's result; ``dtype`` is the noise's, or None for the op's result dtype.
    ``shape(output, *args, **kwargs)`` is the whole noise's, of the first output's whole shape; both have the
    divided dims in common. ``of_slices``: only for a slice of what all draw; otherwise the op itself runs.
    """

    fill: Callable[..., object]
    finish: Callable[..., Any]
    dtype: torch.dtype | None = None
    of_slices: bool = False
    shape: Callable[..., tuple[int, ...]] = _shape


def _keep(noise: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return noise


def _fill_dropout(
    flat: torch.Tensor, generator: torch.Generator, x: Any, p: float, train: bool | None
) -> object:
    return flat.fill_(True) if train is False else flat.bernoulli_(1.0 - p, generator=generator)


def _dropout(
    mask: torch.Tensor, x: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False:
        return x.clone(), mask
    return x * mask * (0.0 if p == 1 else 1.0 / (1.0 - p)), mask


def _fill_uniform(flat: torch.Tensor, generator: torch.Generator, *args: Any, **kwargs: Any) -> object:
    return flat.uniform_(generator=generator)


def _fill_normal(flat: torch.Tensor, generator: torch.Generator, *args: Any, **kwargs: Any) -> object:
    return flat.normal_(generator=generator)


def _bernoulli(noise: torch.Tensor, x: torch.Tensor, p: Any = None, **kwargs: Any) -> torch.Tensor:
    return (noise < (x if p is None else p)).to(x.dtype)


def _uniform(
    noise: torch.Tensor, x: torch.Tensor, low: float = 0.0, high: float = 1.0, **kwargs: Any
) -> torch.Tensor:
    return noise * (high - low) + low


def _normal(
    noise: torch.Tensor, x: torch.Tensor, mean: float = 0.0, std: float = 1.0, **kwargs: Any
) -> torch.Tensor:
    return noise * std + mean


def _affine(noise: torch.Tensor, mean: Any, std: Any = 1.0, *args: Any, **kwargs: Any) -> Any:
    return noise * std + mean


def _fill_exponential(
    flat: torch.Tensor, generator: torch.Generator, x: Any, lambd: float = 1.0, **kwargs: Any
) -> object:
    return flat.exponential_(lambd, generator=generator)


def _fill_cauchy(
    flat: torch.Tensor,
    generator: torch.Generator,
    x: Any,
    median: float = 0.0,
    sigma: float = 1.0,
    **kwargs: Any,
) -> object:
    return flat.cauchy_(median, sigma, generator=generator)


def _fill_geometric(
    flat: torch.Tensor, generator: torch.Generator, x: Any, p: float, **kwargs: Any
) -> object:
    return flat.geometric_(p, generator=generator)


def _fill_log_normal(
    flat: torch.Tensor, generator: torch.Generator, x: Any, mean: float = 1.0, std: float = 2.0, **kwargs: Any
) -> object:
    return flat.log_normal_(mean, std, generator=generator)


def _fill_integers(
    flat: torch.Tensor, generator: torch.Generator, high: int, *args: Any, **kwargs: Any
) -> object:
    return flat.random_(0, high, generator=generator)


def _fill_range(
    flat: torch.Tensor, generator: torch.Generator, low: int, high: int, *args: Any, **kwargs: Any
) -> object:
    return flat.random_(low, high, generator=generator)


def _fill_integers_like(
    flat: torch.Tensor, generator: torch.Generator, x: Any, high: int, **kwargs: Any
) -> object:
    return flat.random_(0, high, generator=generator)


def _fill_range_like(
    flat: torch.Tensor, generator: torch.Generator, x: Any, low: int, high: int, **kwargs: Any
) -> object:
    return flat.random_(low, high, generator=generator)


def _rrelu(
    noise: torch.Tensor,
    x: torch.Tensor,
    noise_input: Any,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    slope = torch.where(x <= 0, noise * (upper - lower) + lower, 1.0)
    return x * slope, slope


def _fill_kept(flat: torch.Tensor, generator: torch.Generator, x: Any, p: float, **kwargs: Any) -> object:
    return flat.bernoulli_(p, generator=generator)


def _fused_dropout(
    mask: torch.Tensor, x: torch.Tensor, p: float, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return x * mask * (0.0 if p == 0 else 1.0 / p), mask


def _poisson(noise: torch.Tensor, rate: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """The least k with P(X <= k) >= noise, by bisection."""
    mean = rate.double()
    low = torch.full_like(mean, -1.0)
    high = torch.ceil(mean + 40 * mean.sqrt() + 40)
    for _ in range(max(int(high.max()), 1).bit_length() + 1 if high.numel() else 0):
        middle = torch.floor((low + high) / 2)
        reached = torch.special.gammaincc(middle + 1, mean.clamp_min(1e-300)) >= noise
        reached &= middle >= 0
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return torch.where(mean > 0, high, 0.0).to(rate.dtype)


def _binomial(noise: torch.Tensor, count: torch.Tensor, p: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """The least k with P(X <= k) >= noise, by summing up."""
    total, chance = count.double() + torch.zeros_like(p), p.double() + torch.zeros_like(count)
    logs = chance.clamp(1e-300, 1.0).log(), (1 - chance).clamp(1e-300, 1.0).log()
    successes, reached = total.clone(), torch.zeros_like(total)
    for k in range(int(total.max()) + 1 if total.numel() else 0):
        ways = torch.lgamma(total + 1) - torch.lgamma(torch.full_like(total, k + 1.0))
        ways = ways - torch.lgamma((total - k).clamp_min(0) + 1)
        added = (ways + k * logs[0] + (total - k) * logs[1]).exp()
        before = reached
        reached = before + torch.where(total >= k, added, 0.0)
        successes = torch.where(
            (before < noise) & (noise <= reached), torch.full_like(successes, float(k)), successes
        )
    successes = torch.where(noise == 0, 0.0, successes)
    successes = torch.where(chance >= 1, total, torch.where(chance <= 0, 0.0, successes))
    return torch.minimum(successes, total).to(count.dtype)


def _of_choices(
    shape: tuple[int, ...], x: torch.Tensor, n: int, replacement: bool = False, **_: Any
) -> tuple[int, ...]:
    return shape if replacement else (*shape[:-1], x.shape[-1])


def _fill_choices(
    flat: torch.Tensor, generator: torch.Generator, x: Any, n: int, replacement: bool = False, **kwargs: Any
) -> object:
    return flat.uniform_(generator=generator) if replacement else flat.exponential_(generator=generator)


def _choices(
    noise: torch.Tensor, x: torch.Tensor, n: int, replacement: bool = False, **kwargs: Any
) -> torch.Tensor:
    chances = x.double()
    if not replacement:
        return (chances / noise).topk(n, -1).indices
    upto = chances.cumsum(-1)
    last = (chances > 0).long().cumsum(-1).argmax(-1, keepdim=True)
    choices = torch.searchsorted(upto, noise * upto[..., -1:], right=True)
    return torch.minimum(choices, last.expand_as(choices))


NOISE: dict[str, Noise] = {
    "aten.native_dropout.default": Noise(_fill_dropout, _dropout, torch.bool),
    "aten.bernoulli.default": Noise(_fill_uniform, _bernoulli, torch.float32),
    "aten.bernoulli.p": Noise(_fill_uniform, _bernoulli, torch.float32),
    "aten.bernoulli.Tensor": Noise(_fill_uniform, _bernoulli, torch.float32),
    "aten.rand.default": Noise(_fill_uniform, _keep),
    "aten.rand_like.default": Noise(_fill_uniform, _keep),
    "aten.randn.default": Noise(_fill_normal, _keep),
    "aten.randn_like.default": Noise(_fill_normal, _keep),
    "aten.uniform.default": Noise(_fill_uniform, _uniform),
    "aten.normal_functional.default": Noise(_fill_normal, _normal),
    "aten.normal.Tensor_Tensor": Noise(_fill_normal, _affine, of_slices=True),
    "aten.normal.Tensor_float": Noise(_fill_normal, _affine, of_slices=True),
    "aten.normal.float_Tensor": Noise(_fill_normal, _affine, of_slices=True),
    "aten.normal.float_float": Noise(_fill_normal, _affine, of_slices=True),
    "aten.exponential.default": Noise(_fill_exponential, _keep, of_slices=True),
    "aten.cauchy.default": Noise(_fill_cauchy, _keep, of_slices=True),
    "aten.geometric.default": Noise(_fill_geometric, _keep, of_slices=True),
    "aten.log_normal.default": Noise(_fill_log_normal, _keep, of_slices=True),
    "aten.randint.default": Noise(_fill_integers, _keep, torch.int64, of_slices=True),
    "aten.randint.low": Noise(_fill_range, _keep, torch.int64, of_slices=True),
    "aten.randint_like.default": Noise(_fill_integers_like, _keep, of_slices=True),
    "aten.randint_like.low_dtype": Noise(_fill_range_like, _keep, of_slices=True),
    "aten.rrelu_with_noise_functional.default": Noise(_fill_uniform, _rrelu, of_slices=True),
    "aten._fused_dropout.default": Noise(_fill_kept, _fused_dropout, torch.uint8, of_slices=True),
    "aten.poisson.default": Noise(_fill_uniform, _poisson, torch.float64, of_slices=True),
    "aten.binomial.default": Noise(_fill_uniform, _binomial, torch.float64, of_slices=True),
    "aten.multinomial.default": Noise(
        _fill_choices, _choices, torch.float64, of_slices=True, shape=_of_choices
    ),
}


def divisible(op: str) -> bool:
    """Whether a part of what the random op ``op`` draws can be had by drawing all of its noise."""
    return op in NOISE

"""Random numbers of distributed programs: one value of a random op means one thing on all ranks.

A random instruction that runs whole on every device (its row has no factor) must draw the same everywhere:
it uses the *shared* generator, seeded alike at the start and advanced alike by all. An instruction whose row
shards its output draws from this rank's *own* generator. In *reference* mode (verification) an instruction
draws the noise of the whole tensor from ``(seed, step, instruction)`` and takes its slice, so that a program
on any number of devices sees what one device sees.

Ops in :data:`hetspmd.program.noise.NOISE` are split into noise, drawn with an explicit generator, and the arithmetic
around it, always or where a slice of what all draw is wanted. Otherwise they run, as other random ops do, with the
default generator's state exchanged for the drawn-from one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetspmd.errors import RandomOpError
from hetspmd.program.noise import NOISE, Noise

Region = tuple[int, int, int]
"""(dim, start, extent) of the slice of the whole tensor that a rank holds."""

_CHUNK = 1 << 16
_DEFAULT_STATE = threading.Lock()


@dataclass(frozen=True)
class Draw:
    """How an instruction draws.

    ``instruction`` is its id; ``shape`` the whole shape of its first output; ``region`` the slice that this
    rank holds (None: all of it, and the same on every rank), and ``within`` slices of that slice, one of the other.
    ``shared``: other ranks hold the same slice, so that all ranks draw the whole tensor's noise.
    """

    instruction: int
    shape: tuple[int, ...]
    region: Region | None = None
    within: tuple[Region, ...] = ()
    shared: bool = False

    @property
    def regions(self) -> tuple[Region, ...]:
        """All slices, from the outermost."""
        return self.within if self.region is None else (self.region, *self.within)


class Randomness:
    """The random numbers of one rank.

    ``seed`` is agreed between the ranks. ``reference`` turns reference mode on. :meth:`begin_step` is called
    before each forward pass.
    """

    def __init__(self, seed: int, rank: int, device: torch.device, *, reference: bool = False) -> None:
        self.seed = seed & 0x7FFF_FFFF_FFFF_FFFF
        self.step = -1
        self.device = device
        self.reference = reference
        kind = device if device.type == "cuda" else torch.device("cpu")
        self._shared = torch.Generator(kind)
        self._own = torch.Generator(kind)
        self._reference = torch.Generator(kind)
        self._shared.manual_seed(_mix(self.seed, 0))
        self._own.manual_seed(_mix(self.seed, rank + 1))

    def begin_step(self) -> None:
        """A new step: reference mode draws anew."""
        self.step += 1

    def shared_state(self) -> torch.Tensor:
        """The state of the generator that all ranks draw from alike, on the CPU."""
        return self._shared.get_state()

    def get_state(self) -> dict[str, Any]:
        """The state, for checkpoints."""
        return {
            "seed": self.seed,
            "step": self.step,
            "shared": self._shared.get_state(),
            "own": self._own.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`get_state`."""
        self.seed, self.step = state["seed"], state["step"]
        self._shared.set_state(state["shared"])
        self._own.set_state(state["own"])

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The generators that instructions draw from, but in reference mode."""
        return self._shared, self._own

    @property
    def own(self) -> torch.Generator:
        """The generator that only this rank draws from alike."""
        return self._own

    def generator(self, draw: Draw) -> torch.Generator:
        """The generator that an instruction draws from."""
        if self.reference:
            self._reference.manual_seed(_mix(self.seed, self.step, draw.instruction))
            return self._reference
        return self._shared if draw.region is None or draw.shared else self._own


def next_seed() -> int:
    """A seed from torch's default generator: what it would draw next, which it still will, its state is left."""
    peek = torch.Generator()
    peek.set_state(torch.default_generator.get_state())
    return int(torch.randint(2**62, (), generator=peek, device="cpu"))


def is_drawn_by_generator(op: Any) -> bool:
    """Whether what a random op draws comes of a generator that it is given, always but in reference mode; the host
    looks at no value then."""
    noise = NOISE.get(str(op))
    return noise is not None and not noise.of_slices


def may_draw(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an ATen op may draw random numbers: attention without dropout does not, although torch calls it random."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            value = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return not (isinstance(value, float) and value == 0.0)
    return True


def random_op(
    randomness: Randomness, draw: Draw, op: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Run a random op on this rank. Raises RandomOpError for an op that reference mode cannot slice."""
    whole = randomness.reference or draw.shared
    noise_of = NOISE.get(str(op))
    if noise_of is None and whole and draw.region is not None:
        raise RandomOpError(
            f"{op} is sharded, and a part of what it draws cannot be had: it can be neither compared with a single "
            "device nor drawn alike by several. Keep it whole, by a constraint such as {'NAME': 'replicated'} of "
            "the inputs or parameters beside it"
        )
    if noise_of is None or (noise_of.of_slices and not whole):
        generator = randomness.generator(draw)
        return _with_default_state(generator, randomness.device, lambda: op(*args, **kwargs))
    dtype = kwargs.get("dtype") or noise_of.dtype or _result_dtype(args)
    noise = drawn_noise(randomness, draw, noise_of, args, kwargs, dtype)
    return noise_of.finish(noise, *args, **kwargs)


def drawn_noise(
    randomness: Randomness,
    draw: Draw,
    noise_of: Noise,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The noise of an op on this rank."""
    generator, whole = randomness.generator(draw), randomness.reference or draw.shared
    shape = noise_of.shape(draw.shape, *args, **kwargs)
    for dim, _, extent in () if whole else draw.regions:
        shape = (*shape[:dim], extent, *shape[dim + 1 :])
    noise = torch.empty(shape, dtype=dtype, device=randomness.device)
    flat = noise.view(-1)
    # Above a chunk, the numbers of a CUDA generator depend on how many processors the GPU has.
    chunk = _CHUNK if noise.is_cuda and (draw.region is None or whole) else max(flat.numel(), 1)
    for start in range(0, flat.numel(), chunk):
        noise_of.fill(flat[start : start + chunk], generator, *args, **kwargs)
    for region in draw.regions if whole else ():
        noise = noise.narrow(*region)
    return noise


def drawn_inside(randomness: Randomness, kernel: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Run what draws this rank's own numbers from the default generator of the device."""
    return _with_default_state(randomness.own, randomness.device, lambda: kernel(*args))


def _mix(*values: int) -> int:
    """A 63-bit seed from integers (splitmix64's finaliser, chained)."""
    state = 0x9E37_79B9_7F4A_7C15
    for value in values:
        state = (state ^ (value & 0xFFFF_FFFF_FFFF_FFFF)) * 0xBF58_476D_1CE4_E5B9 & 0xFFFF_FFFF_FFFF_FFFF
        state ^= state >> 27
        state = state * 0x94D0_49BB_1331_11EB & 0xFFFF_FFFF_FFFF_FFFF
        state ^= state >> 31
    return state & 0x7FFF_FFFF_FFFF_FFFF


def _with_default_state(generator: torch.Generator, device: torch.device, call: Callable[[], Any]) -> Any:
    """Run ``call`` with the default generator of ``device`` in ``generator``'s state, and advance that."""
    default = torch.default_generator
    if device.type == "cuda":
        default = torch.cuda.default_generators[device.index or 0]
    with _DEFAULT_STATE:
        saved = default.get_state()
        default.set_state(generator.get_state())
        try:
            return call()
        finally:
            generator.set_state(default.get_state())
            default.set_state(saved)


def _result_dtype(args: Sequence[Any]) -> torch.dtype:
    for value in args:
        if isinstance(value, torch.Tensor):
            return value.dtype
    return torch.get_default_dtype()

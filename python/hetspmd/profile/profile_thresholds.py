"""The numbers by which a cluster is measured, each with its unit and its reason."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final


@dataclass(frozen=True, kw_only=True)
class ProfileThresholds:
    """How much is measured, how often, and what counts as equal. Seconds are of the clock, bytes of whole tensors,
    unless said otherwise."""

    # Samples, of whatever is measured.

    confidence: float = 0.95
    """The probability with which an interval holds the median: what is usual."""

    first_samples: int = 6
    """Samples of the least interval with that confidence."""

    most_samples: int = 400
    """Samples at which a measurement is given up as noisy: the interval shrinks with their root alone."""

    page_faults: int = 16
    """Page faults of a call that any call may have: they take less time than a call varies by."""

    more_page_faults: float = 1.2
    """Times as many page faults as another sample of the call has, from which a sample does not count: its memory
    has not settled."""

    meeting_timeout: timedelta = timedelta(minutes=5)
    """How long ranks wait for each other: they may be started by hand, one machine after the other."""

    # The rates of devices.

    device_part: float = 1 / 3
    """The part of the budget that goes to the devices: they are measured at the same time, groups of ranks one
    after the other."""

    device_call_seconds: float = 0.06
    """Seconds of one call: thousands of times a launch, and many periods of a short CPU quota. In calls of 25 to
    32 ms one of four equal emulated ranks seemed to read memory 20 % faster than the others, in calls of 90 ms
    none."""

    device_calls: int = 300
    """Calls that a budget has room for, however small: with a smaller budget, calls are shorter."""

    device_rounds: int = 3
    """Rounds over all rates, so that what slows a device for some seconds falls on a part of everyone's samples."""

    warm_calls: int = 3
    """Calls of which the shortest tells how long a call is: one may fall into a pause of a device whose time is
    shared out in slices."""

    product_sides: tuple[int, int] = (128, 16384)
    """The extents of a square product, the smallest and the largest, where calls need not get longer."""

    convolution_channels: int = 128
    """Channels of the convolution, in and out: many, as in the middle of a network."""

    convolution_images: tuple[tuple[int, int], ...] = (
        (1, 8),
        (1, 16),
        (1, 32),
        (1, 64),
        (4, 64),
        (16, 64),
        (64, 64),
        (256, 64),
    )
    """(batch, height = width) of the convolution, each with four times the FLOPs of the one before."""

    cpu_memory_bytes: int = 16 * 2**20
    """Bytes of each of the two operands and the result that pass through the memory of a CPU: together they are
    more than the last cache of most holds (``cpu_arena_bytes``)."""

    gpu_memory_bytes: int = 256 * 2**20
    """The same on a GPU."""

    launch_chain: int = 300
    """Ops of a chain whose launches are timed: the first and the last of them hardly count."""

    optimizer_parameters: int = 8
    """Parameters of the optimizer's step whose rate is measured: several, as in a model."""

    cpu_parameter_bytes: int = 4 * 2**20
    """Bytes of each of them in float32 on a CPU: all of them exceed most caches."""

    gpu_parameter_bytes: int = 32 * 2**20
    """The same on a GPU."""

    # Which devices are equal.

    alike_rates: float = 0.1
    """The part by which the rates of equal devices differ on average, and their memory: as noise makes them."""

    alike_rate: float = 0.25
    """The part by which one rate of equal devices may differ. On a busy host medians of equal ranks were found 13 %
    apart, tight intervals and all."""

    alike_launch: float = 0.5
    """The part by which their launches may differ, which are the host's. They were found 40 % apart."""

    rank_groups: int = 4
    """Groups of the fastest kinds of devices between which collectives are measured: each takes a part of the
    budget."""

    # Collectives.

    level_bytes: tuple[int, ...] = tuple(4096 * 8**i for i in range(6))
    """Bytes of the whole tensor: 4 KiB, where latency is all, to 128 MiB, where bandwidth is."""

    shard_units: int = 256
    """Rows of a tensor that is gathered or scattered: shares are exact to a 512th."""

    skew_fall: float = 8.0
    """Times as much as the slowest device that the fastest holds of skewed shards: as unlike as the devices of a
    cluster are."""

    first_levels: int = 3
    """Sizes that are measured whatever the budget: fewer tell nothing of a bandwidth."""

    hidden_growth: float = 3.0
    """Times the seconds of the least size that a collective must take for its bandwidth to be seen beside its
    latency."""

    hidden_level_seconds: float = 60.0
    """Seconds that one size may take beyond the budget where bandwidths are still hidden."""

    hardly_grown: float = 2.0
    """Times the seconds of the least size that a collective must take at the largest to get a curve: below that,
    its bandwidth is unknown."""

    row_collectives: int = 4
    """Collectives in a row: the first of them begins on idle links, the others do not."""

    rows: int = 2
    """Rows of them, of which the quickest counts."""

    row_bytes: int = 16 << 20
    """The most bytes of a collective in a row: bandwidth decides there, and a row of larger ones takes seconds."""

    meeting_part: float = 1.5
    """Seconds that a sample takes with its meeting before it, per second of the collective."""

    lane_counts: tuple[int, ...] = (1, 2, 4, 8)
    """How many collectives are started together, to see how many the backend has on their way."""

    lane_rounds: int = 40
    """Samples of each of these, of which the mean counts: they are short and vary much."""

    lane_part: float = 1.5
    """Times the seconds of one alone, below which collectives that are started together are on their way together:
    between once and twice."""

    issue_sizes: tuple[tuple[int, int], ...] = ((1 << 14, 40), (1 << 21, 8))
    """Bytes of a collective whose issue is timed, and how often of each kind; two, for a line through them."""

    issue_cold_bytes: int = 1 << 23
    """Bytes that work between two of them touches: more than most caches of a core hold."""

    pace_seconds: float = 0.5
    """Seconds of computing that tell what a second of CPU time takes: several periods of a CPU quota."""

    # Computing beside collectives.

    beside_seconds: float = 0.1
    """Seconds of a collective beside which is computed: many periods of a CPU quota, and many pieces of work."""

    beside_bytes: int = 16 << 20
    """The most bytes of it."""

    beside_rounds: int = 3
    """Rounds, of which the median counts."""

    beside_product: int = 192
    """The side of the product in a piece of work: a piece takes about a millisecond of a CPU's core."""

    beside_cold_bytes: int = 1 << 20
    """Bytes that the addition in a piece of work passes over: more than the first caches hold."""

    slowdown_noise: float = 0.03
    """The part by which seconds of work vary anyway."""

    # Curves through points.

    point_noise: float = 0.05
    """The standard deviation of the logarithm of a point's seconds beside what its interval tells: what a curve may
    be off at a point that was measured well."""

    fit_rounds: int = 20
    """Rounds of Gauss and Newton's method, of which the best counts."""

    better_fit: float = 1e-12
    """The part by which a sum of squares must be less: the rest is rounding."""

    predicted_range: tuple[float, float] = (0.01, 100.0)
    """Times the measured seconds within which a round takes a prediction, so that no logarithm runs away."""

    target_range: tuple[float, float] = (0.1, 3.0)
    """Times the prediction within which a round takes what it aims at: farther off its line is no good tangent."""

    # Ops of a model.

    shares: tuple[float, ...] = (0.25, 0.5, 0.125)
    """Shares of an axis, in the order in which they are measured, after 1: those that devices of a small cluster
    have."""

    op_turns: int = 3
    """Turns through all tasks, so that a machine that is slow for some seconds spoils a part of the samples."""

    sample_seconds: float = 0.01
    """Seconds of a sample of short calls: many ticks of the clock."""

    single_call_seconds: float = 0.005
    """Seconds of a call on a CPU below which calls are timed one by one even if several threads compute: the caches
    decide how long a short one takes."""

    calls_of_sample: int = 2000
    """Calls of a sample at most."""

    cpu_arena_bytes: int = 64 * 2**20
    """Bytes through which inputs rotate on a CPU: twice the last cache of most."""

    gpu_arena_bytes: int = 256 * 2**20
    """The same on a GPU: several times its cache."""

    input_sets: int = 64
    """Sets of inputs at most, and parameters of an optimizer's step: small ones take long to make."""

    memory_part: float = 0.5
    """The part of a device's memory that inputs and results of one op may take: kernels need some of the rest."""

    least_float: float = 0.1
    """The least number of inputs, which lie below 1: nothing is denormal, infinite or not a number."""

    tile_elements: int = 2**20
    """Random elements that are repeated throughout an arena: to draw all would take long."""

    aligned_elements: int = 64
    """Elements to a multiple of which each input begins, as memory that an allocator gives."""

    cold_bytes: int = 2**21
    """Bytes touched between two calls: twice the second cache of most CPUs."""

    past_weight: float = 0.98
    """The weight of the past, at each sample, in what a CPU second takes: some fifty samples count."""

    empty_samples: int = 10
    """Samples of calls that do nothing, of which the least is what timing a call takes."""

    # Whole steps of a model.

    step_samples: int = 3
    """Steps of so many rows that are timed at least: the median of three bears one that was held up."""

    step_part: float = 0.125
    """The part of what is left of the budget that goes to the samples of one number of rows: many are tried."""

    model_part: float = 0.5
    """The part of the budget of a model's ops and steps that goes to the steps."""

    limit_guesses: int = 4
    """Guesses at the rows that fit, before the interval is halved: bytes grow in proportion to rows, and the second
    guess mostly ends it."""

    most_rows: int = 2**20
    """Rows at which growing ends where memory does not: more than one device is given at a time."""

    speed_step: float = 1.1
    """Times the FLOP/s from which devices of one name have points of their own on disk: a tenth is noise."""


THRESHOLDS: Final = ProfileThresholds()
"""Those that are used."""

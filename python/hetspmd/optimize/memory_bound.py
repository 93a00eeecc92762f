"""Whether any program could fit the memory, before one is searched, and what would help where none can."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.machines import device_word
from hetspmd.cost.least_memory import LeastMemory
from hetspmd.cost.memory import OPTIMIZER_BYTES
from hetspmd.cost.model import CostModel
from hetspmd.errors import DroppedOutputWarning, MemoryBoundError, MicroBatchError
from hetspmd.optimize.in_micro_batches import in_micro_batches
from hetspmd.program.micro_batches import MicroBatches, samples
from hetspmd.rules.theory import Theory
from hetspmd.search.constraints import Constraints


def require_room(
    theory: Theory,
    cluster: Cluster,
    batches: MicroBatches | None,
    constraints: Constraints,
    *,
    compare: bool,
) -> LeastMemory | None:
    """What any program must hold, where one might fit the devices; None where some have no limit.

    ``compare``: other numbers of micro-batches are compared where it cannot.

    Raises MemoryBoundError where what any program holds (:mod:`hetspmd.cost.least_memory`) is more than all devices
    together have.
    """
    capacity = np.array([device.memory for device in cluster.devices], dtype=float)
    if cluster.steps:  # as bytes are counted, where steps of the model were measured
        capacity = CostModel(theory, cluster, batches).capacity
    if np.isinf(capacity).any():
        return None
    bound = LeastMemory(theory, batches, constraints.forms)
    needed = bound.needed(capacity)
    if not needed.missing:
        return bound
    totals: dict[int, int] = {}
    enough: int | None = None
    for count, least in _in_turns(theory, batches, constraints) if compare else ():
        totals[count] = least.needed(capacity).total
        if least.fits(capacity):
            enough = count
            break
    raise MemoryBoundError(
        needed.parts,
        int(needed.room),
        [(device.name, int(device.memory)) for device in cluster.devices],
        micro_batches=totals,
        enough=enough,
        word=device_word(cluster),
    )


def lasting_part(theory: Theory, cluster: Cluster) -> float:
    """The part of the memory of all devices that parameters, the optimizer's state and gradients fill that are
    nowhere held twice; 0 where the cluster does not say how much there is."""
    room = float(sum(device.memory for device in cluster.devices))
    held = 0
    for parameter in theory.graph.parameters:
        meta = theory.graph.tensors[parameter.tensor]
        held += meta.nbytes
        if parameter.gradient is not None:
            held += meta.nbytes + meta.numel * OPTIMIZER_BYTES
    return min(held / room, 1.0) if np.isfinite(room) else 0.0


def _in_turns(
    theory: Theory, batches: MicroBatches | None, constraints: Constraints
) -> Iterator[tuple[int, LeastMemory]]:
    """What is needed in more micro-batches than there are, doubled each time, as far as the step can be divided."""
    most = samples(theory, theory.batch_axes) if theory.graph.loss is not None else 0
    count = 1 if batches is None else batches.count
    while count < most:
        count = min(2 * count, most)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DroppedOutputWarning)
                divided = in_micro_batches(theory, count)
        except MicroBatchError:
            return
        yield count, LeastMemory(*divided, constraints.forms)

"""What messages of the roll call say of ranks that are each given their own rows of a batch."""

from __future__ import annotations

from typing import Final

ORDER: Final = "list of samples"
"""How messages call which samples a batch has."""
OWN: Final = "own rows of a batch of"
"""How the words about such a call begin."""
PAD: Final = (
    "a collate_fn sees the samples of its own rank alone. Pad to a fixed length (padding='max_length'), or give "
    'every rank the whole batch: HAP(..., batch="whole") and a plain DataLoader'
)
PARTED: Final = f'with batch="own" every rank takes its rows of the same batch, in the same mode; {PAD}'
ORDERED: Final = (
    "every rank's hetspmd.loader goes over the same samples in the same order: give all the same dataset, "
    "batch_size, sampler and seed=, and take a batch on every rank or on none"
)

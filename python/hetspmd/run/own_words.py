"""What messages say where a rank's own rows are not what they should be."""

from __future__ import annotations

from collections.abc import Sequence

from hetspmd.dist.own_rows_words import PAD
from hetspmd.run.row_shares import Share


def no_loader(rank: int, loaders: int) -> str:
    """No tensor of a call is one that a loader has yielded."""
    made = "" if loaders else ", and no loader was made"
    return (
        f'rank {rank}: HAP(..., batch="own") is called with the batches that hetspmd.loader(dataset, hap, ...) '
        f"yields, and none of these tensors is one of its rows{made}. At least one of them must be the loader's "
        "own or a view of it: change tensors in the dataset or the collate_fn, and take a plain DataLoader with "
        'batch="whole" only'
    )


def mixed_batches(rank: int) -> str:
    """The tensors of a call are of several batches."""
    return (
        f"rank {rank}: the tensors of this call are of several batches of a loader; call the model with one"
    )


def counted(rank: int, path: str, shape: Sequence[int], share: Share) -> str:
    """A tensor has not as many rows as the rank was given."""
    rows = ", ".join(f"{start}..{stop - 1}" for start, stop in share.rows[rank]) or "none"
    return (
        f"rank {rank}: {path} has the shape {list(shape)}, and dim 0 should be the {share.count(rank)} rows that "
        f"the loader gave this rank of the {share.size} of the batch (rows {rows}); call the model with all of "
        "them, in their order"
    )


def two_kinds(path: str, kinds: Sequence[str]) -> str:
    """A tensor looks like rows on some ranks and like a whole one on others."""
    ranks = ", ".join(str(rank) for rank, kind in enumerate(kinds) if kind == "rows")
    return (
        f"{path} is none of the loader's tensors, and has as many rows as its rank was given on rank {ranks} "
        "alone; let the dataset or the collate_fn make it, so that the loader knows whether it is of the samples"
    )


def unsure(path: str) -> str:
    """A tensor may be rows, or a whole one."""
    return (
        f"{path} is none of the loader's tensors, is the same on every rank, and has as many rows as a rank was "
        "given: it may be of the samples or not. Let the dataset or the collate_fn make it, so that the loader "
        "knows"
    )


def another_shape(path: str, kind: str, shapes: Sequence[tuple[str, Sequence[int]]]) -> str:
    """The ranks' tensors cannot be of one batch."""
    told = ", ".join(f"rank {rank}: {dtype}{list(shape)}" for rank, (dtype, shape) in enumerate(shapes))
    what = "rows" if kind == "rows" else "shape"
    return f"{path} has another {what} on some ranks than on others ({told}); {PAD}"


def not_alike(path: str, row: int, ranks: Sequence[int]) -> str:
    """Ranks that loaded the same sample got something else."""
    return (
        f"row {row} of {path} is not the same on ranks {', '.join(map(str, ranks))}, which all load it. The "
        "loader seeds torch, numpy and random alike for a sample wherever it is loaded: draw from their global "
        "generators, not from one of the dataset's own, give seed= to the loader, and let no sample depend on the "
        "others of its batch"
    )

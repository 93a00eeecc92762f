"""Arguments that several commands take."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    pass


def add_target(parser: argparse.ArgumentParser) -> None:
    """TARGET, ``--cluster``, ``--constraints``, ``--segments``, ``--machines``, ``--micro-batches``, ``--zero``,
    ``--recompute``, ``--autocast`` and ``--json``."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="file.py[:function] or package.module[:function]; the function (default: build) returns "
        "(model, example)",
    )
    parser.add_argument("--cluster", required=True, metavar="FILE", help="cluster file (YAML or JSON)")
    parser.add_argument(
        "--constraints",
        metavar="FILE",
        help="globs over parameters, inputs and output[i] to replicated or shard(d) (YAML or JSON)",
    )
    parser.add_argument(
        "--segments",
        type=auto_or_count,
        default="auto",
        metavar="N",
        help="parts of the model with sharding ratios of their own: a number, or auto for as many as gain, in "
        "micro-batches for one (auto)",
    )
    parser.add_argument(
        "--machines",
        choices=("auto", "virtual", "flat"),
        default="auto",
        help="plan entries of several accelerators as virtual devices, data parallel inside, or flat, each "
        "accelerator by itself (auto: the cheaper)",
    )
    _add_memory(parser)
    add_autocast(parser, "trace the model under torch.autocast in this dtype: bfloat16 or float16")
    parser.add_argument(
        "--json", metavar="OUT", help="write the result as JSON (-: to standard output, instead of text)"
    )


def add_autocast(parser: argparse.ArgumentParser, what: str) -> None:
    """``--autocast``; ``what`` it does."""
    parser.add_argument("--autocast", choices=("bfloat16", "float16"), metavar="DTYPE", help=what)


def _add_memory(parser: argparse.ArgumentParser) -> None:
    """What a step does to take less memory: ``--micro-batches``, ``--zero`` and ``--recompute``."""
    parser.add_argument(
        "--micro-batches",
        type=auto_or_count,
        default=1,
        metavar="N",
        help="parts of the batch that a step takes one after the other: a number, or auto for the fastest of one, "
        "two, four and so on that fit the memory (1)",
    )
    parser.add_argument(
        "--zero",
        type=int,
        choices=(0, 1, 2, 3),
        metavar="LEVEL",
        help="data parallelism at this level of ZeRO, 0 to 3, and nothing else (the search decides, for each "
        "parameter)",
    )
    parser.add_argument(
        "--recompute",
        type=recomputed,
        default="checkpoints",
        metavar="WHAT",
        help="activations that the backward computes again: checkpoints (the model's own regions of "
        "torch.utils.checkpoint), none, all (these and repeating blocks), selective (these and what is cheap), "
        "auto (as few as fit the memory), or globs over paths of modules, with commas between them (checkpoints)",
    )


def auto_or_count(text: str) -> int | Literal["auto"]:
    """``auto`` or a positive whole number."""
    if text == "auto":
        return "auto"
    try:
        return positive_count(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number from 1 on") from None


def recomputed(text: str) -> str | tuple[str, ...]:
    """A word of ``recompute=``, or globs."""
    return tuple(text.split(",")) if "," in text else text


def positive_seconds(text: str) -> float:
    """A positive, finite number of seconds."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return value


def positive_count(text: str) -> int:
    """A positive whole number."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value

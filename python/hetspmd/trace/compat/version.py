"""The versions of torch with which hetspmd works: told before anything private of torch is imported."""

from __future__ import annotations

import warnings

import torch

from hetspmd.errors import HetspmdError

OLDEST, NEWEST = (2, 11), (2, 15)


def _version() -> tuple[int, int]:
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    return int(major), int(minor)


VERSION = _version()
if VERSION < OLDEST:
    raise HetspmdError(
        f"torch {torch.__version__} is too old: hetspmd needs torch {OLDEST[0]}.{OLDEST[1]} or newer"
    )
if VERSION > NEWEST:
    warnings.warn(
        f"torch {torch.__version__} is newer than {NEWEST[0]}.{NEWEST[1]}, the newest that hetspmd was tested "
        "with; run hetspmd verify on your model first",
        stacklevel=2,
    )

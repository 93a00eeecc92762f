"""Measured points of ops on disk, so that a second model costs only what is new.

    ${HETSPMD_CACHE:-${XDG_CACHE_HOME:-~/.cache}/hetspmd}/ops/DEVICE-HASH.json

One file for each version of this format, machine's device, number of threads, version of torch, optimizer and
*speed*: devices of one name may be unlike (a CPU quota, a power limit), so that the file is also that of the
float32 FLOP/s, rounded to steps of a tenth. ``HETSPMD_DEVICE_NAME`` puts another name in place of the device's own.

A file is read, merged and written beside and renamed, so that ranks that write at the same time leave a whole
file. A file that cannot be read, or written, is a warning: what it holds is measured again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from hetspmd.cluster.devices import Device
from hetspmd.codec.files import write_atomically
from hetspmd.profile.host import processor_name
from hetspmd.profile.profile_thresholds import THRESHOLDS

VERSION: Final = 4
"""Of the file, and of what a point means: since 4 of samples whose memory has settled."""

Points = dict[str, dict[float, tuple[float, float, float, int]]]
"""Key -> share -> (median seconds, low, high, samples)."""


def cache_folder() -> Path:
    """Where the files lie."""
    if own := os.environ.get("HETSPMD_CACHE"):
        return Path(own) / "ops"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "hetspmd" / "ops"


def cache_file(device: torch.device, kind: Device, optimizer: str) -> Path:
    """The file of this rank's ``device``, which is of ``kind`` in the cluster."""
    name = os.environ.get("HETSPMD_DEVICE_NAME") or processor_name(device)
    speed = round(math.log(kind.rate("float32"), THRESHOLDS.speed_step))
    identity = {
        "version": VERSION,
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "speed": speed,
        "optimizer": optimizer,
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "device"
    return cache_folder() / f"{slug}-{digest}.json"


def load_points(path: Path) -> Points:
    """What a file holds; nothing, with a warning, where it is damaged."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        warnings.warn(f"the cache of op times {path} cannot be read ({error}); measuring again", stacklevel=2)
        return {}
    try:
        return _points(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"the cache of op times {path} is damaged ({error}); measuring again", stacklevel=2)
        return {}


def save_points(path: Path, points: Mapping[str, Any]) -> None:
    """Add points to a file; where both have one, the new one stays."""
    merged = load_points(path)
    for key, of_key in points.items():
        merged.setdefault(key, {}).update(of_key)
    document = {
        "version": VERSION,
        "points": {k: [[s, *merged[k][s]] for s in sorted(merged[k])] for k in sorted(merged)},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(document, indent=0) + "\n")
    except OSError as error:
        warnings.warn(f"the cache of op times {path} cannot be written: {error.strerror}", stacklevel=2)


def _points(document: Any) -> Points:
    if document["version"] != VERSION:
        raise ValueError(f"version {document['version']}")
    points: Points = {}
    for key, rows in document["points"].items():
        for row in rows:
            share, seconds, low, high, samples = map(float, row)
            if not all(0 < n < math.inf for n in (share, seconds, low, high, samples)):
                raise ValueError(f"a number of {key} is not positive")
            points.setdefault(key, {})[share] = (seconds, low, high, int(samples))
    return points

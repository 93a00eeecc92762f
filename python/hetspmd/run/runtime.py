"""What a lowered program needs besides tensors: the communicator and the random numbers of its rank."""

from __future__ import annotations

from dataclasses import dataclass

from hetspmd.run.communicator import Communicator
from hetspmd.run.random import Randomness


@dataclass
class Runtime:
    """The first input of every lowered graph."""

    communicator: Communicator
    randomness: Randomness

"""hetspmd: synthesizes uneven SPMD programs for PyTorch training on clusters of unlike devices."""

from __future__ import annotations

"""Measuring a cluster: devices, then collectives between them, to a cluster file (design 6).

:func:`~hetspmd.profile.measure.measure` runs on every rank; ``hetspmd profile`` is its command.
"""

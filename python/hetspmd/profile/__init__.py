"""Measuring a cluster: devices, then collectives between them, to a cluster file.

:func:`~hetspmd.profile.measure.measure` runs on every rank; ``hetspmd profile`` is its command.
"""

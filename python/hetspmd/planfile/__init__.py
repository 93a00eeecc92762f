"""Plan files: text <-> plan, and whether what a file holds may be run.

:mod:`~hetspmd.planfile.text` has the format and its checksum, :mod:`hetspmd.codec` the types,
:mod:`~hetspmd.planfile.graph` the graph's order and roles, :mod:`~hetspmd.planfile.ops` its ops, and
:mod:`~hetspmd.planfile.check` the plan around it, and its proof.
"""

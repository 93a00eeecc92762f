"""Plans: the decisions for one step as data, their file, and whether what a file holds may be run.

:mod:`~hetspmd.plan.plan` has the plan, :mod:`~hetspmd.plan.step_plan` and :mod:`~hetspmd.plan.run_order` what it
says of a step, :mod:`~hetspmd.plan.update` and :mod:`~hetspmd.plan.plan_facts` what follows from it,
:mod:`~hetspmd.plan.text` the format of the file and its checksum, :mod:`~hetspmd.plan.graph_check` the graph's
order and roles, :mod:`~hetspmd.plan.ops_check` its ops, and :mod:`~hetspmd.plan.check` the plan around it, and its
proof.
"""

"""Every private torch import of the project, by what it is for.

Nothing else in hetspmd imports a module or a name of torch that begins with an underscore. The version is looked at
before any of them.
"""

from hetspmd.trace.compat.version import NEWEST, OLDEST, VERSION  # isort: skip

from hetspmd.trace.compat.checkpoint_calls import (
    checkpoints_replaced,
)
from hetspmd.trace.compat.func_transforms import (
    before_transforms,
    transform_around,
)
from hetspmd.trace.compat.groups import (
    forget_default_group,
    group_store,
    hosted_by_a_rank,
    is_of_gloo,
    named_apart,
    timeout_of,
)
from hetspmd.trace.compat.joint import (
    Decompositions,
    assign_data,
    decomposition_table,
    export_joint,
    module_path,
    rehearsal,
)
from hetspmd.trace.compat.roles import (
    InputRole,
    OutputRole,
)
from hetspmd.trace.compat.tensors import (
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    as_plain,
    fake_mode,
    graph_is_kept,
    has_kernel,
    is_class_of_trace,
    is_compiled_module,
    is_op,
    is_sharded_wrapper,
    is_traced,
    memory_of,
    outside_modes,
    print_options,
    replace_node_registration,
    same_content,
)
from hetspmd.trace.compat.tied import (
    merge_tied,
)
from hetspmd.trace.compat.trees import (
    flatten,
    flatten_with_names,
    parts_of,
    spec_from_text,
    spec_to_text,
    unflatten,
)

__all__ = [
    "NEWEST",
    "OLDEST",
    "VERSION",
    "Decompositions",
    "FakeTensorMode",
    "InputRole",
    "OpOverload",
    "OutputRole",
    "TorchDispatchMode",
    "as_plain",
    "assign_data",
    "before_transforms",
    "checkpoints_replaced",
    "decomposition_table",
    "export_joint",
    "fake_mode",
    "flatten",
    "flatten_with_names",
    "forget_default_group",
    "graph_is_kept",
    "group_store",
    "has_kernel",
    "hosted_by_a_rank",
    "is_class_of_trace",
    "is_compiled_module",
    "is_of_gloo",
    "is_op",
    "is_sharded_wrapper",
    "is_traced",
    "memory_of",
    "merge_tied",
    "module_path",
    "named_apart",
    "outside_modes",
    "parts_of",
    "print_options",
    "rehearsal",
    "replace_node_registration",
    "same_content",
    "spec_from_text",
    "spec_to_text",
    "timeout_of",
    "transform_around",
    "unflatten",
]

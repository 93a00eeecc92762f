"""Where in the user's model an error inside a local graph comes from; found when there is an error, not before.

The innermost frame of the graph's code in the traceback gives the node, by the name that its line assigns; a node's
name begins with that of its instruction or tensor. A collective that fails while another one is started is the
:class:`~hetspmd.dist.pending.Pending` that one of the graph's variables holds. The instruction gives the path of
the module, and the module's class the file; the line is the one that calls a submodule of torch's own, or the
head of ``forward``.
"""

from __future__ import annotations

import inspect
import linecache
import re
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch import fx, nn

from hetspmd.cluster.collective_kinds import KINDS, Kind
from hetspmd.dist.coalesced import PendingBucket
from hetspmd.dist.machine_levels import PendingAcross
from hetspmd.dist.pending import Pending
from hetspmd.lower import calls
from hetspmd.lower.emit import identifier
from hetspmd.plan.plan_facts import tensor_roles
from hetspmd.trace.graph import Graph, Instruction, instruction_text

_ASSIGNED = re.compile(r"\s*(\w+)(?:\s*:[^=]*)? = ")


@dataclass(frozen=True)
class SourceLocation:
    """An instruction or collective of a program, and where it comes from in the model, "" where not known."""

    what: str
    module: str
    line: str

    def __str__(self) -> str:
        parts = [self.what]
        if self.module:
            parts.append(f"of module {self.module}")
        if self.line:
            parts.append(f"at {self.line}")
        return " ".join(parts)


class SourceFinder:
    """The single-device graph and the model that a program was made of."""

    def __init__(self, graph: Graph, model: nn.Module) -> None:
        self.graph, self.model = graph, model

    def of_error(self, error: BaseException, program: fx.GraphModule) -> SourceLocation | None:
        """The place in ``program``, or in a graph that it calls (a turn, a stretch), where ``error`` was raised;
        None if it cannot be found."""
        graphs = {type(m).forward.__code__: m for m in program.modules() if isinstance(m, fx.GraphModule)}
        frame: FrameType | None = None
        line, pending = 0, None
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in graphs:
                frame, line, pending = trace.tb_frame, trace.tb_lineno, None
                program = graphs[frame.f_code]
            elif frame is not None and isinstance(trace.tb_frame.f_locals.get("self"), Pending):
                pending = trace.tb_frame.f_locals["self"]
            trace = trace.tb_next
        if frame is None:
            return None
        name = next((n for n, v in frame.f_locals.items() if pending is not None and _is(v, pending)), None)
        if name is None:
            match = _ASSIGNED.match(linecache.getline(frame.f_code.co_filename, line))
            name = match.group(1) if match else ""
        node = next((n for n in program.graph.nodes if n.name == name), None)
        return None if node is None else self.of_node(node)

    def of_node(self, node: fx.Node) -> SourceLocation | None:
        """The place of a node of a local graph."""
        if node.target in (calls.wait, calls.take) and isinstance(node.args[0], fx.Node):
            return self.of_node(node.args[0])
        kind = _kind(node)
        if kind is not None:
            # A bucket is named by the first of its tensors.
            taken = [user.name for user in node.users if user.target is calls.take] or [node.name]
            tensor = self._longest(taken[0], [t.name for t in self.graph.tensors])
            if tensor is None:
                return SourceLocation(f"{kind} {node.name}", "", "")
            instruction = self.graph.instructions[self.graph.producers[tensor]]
            more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
            what = f"{kind} of {self.graph.tensors[tensor].name} ({tensor_roles(self.graph)[tensor]}){more}"
            return self._place(what, instruction)
        index = self._longest(node.name, [i.name for i in self.graph.instructions])
        if index is None:
            return SourceLocation(node.name, "", "")
        instruction = self.graph.instructions[index]
        return self._place(f"`{instruction_text(self.graph, instruction)}`", instruction)

    def _longest(self, name: str, names: list[str]) -> int | None:
        """The index of the longest of ``names`` that the identifier ``name`` begins with."""
        best, length = None, 0
        for index, candidate in enumerate(names):
            text = identifier(candidate)
            if len(text) > length and (name == text or name.startswith(f"{text}_")):
                best, length = index, len(text)
        return best

    def _place(self, what: str, instruction: Instruction) -> SourceLocation:
        phase = "backward of " if instruction.phase == "backward" else ""
        path = instruction.source
        return SourceLocation(
            what, phase + (path or type(self.model).__name__), source_line(self.model, path)
        )


def _kind(node: fx.Node) -> str | None:
    """What kind of collective a node starts, None if it starts none."""
    if node.target in (calls.start, calls.start_bucket):
        return KINDS[cast("Kind", node.args[1])].text
    across = node.target in (calls.start_across, calls.start_bucket_across)
    return "collective between machines" if across else None


def _is(value: object, pending: Pending[Any]) -> bool:
    if isinstance(value, PendingBucket):
        value = value.pending
    if isinstance(value, PendingAcross):
        value = value.carried
    return value is pending


def source_line(model: nn.Module, path: str) -> str:
    """``file:line`` of the code that runs the module at ``path``, "" if there is no source.

    A module of torch's own is where the innermost module around it that is not torch's calls it.
    """
    chain = [(model, "")]
    for name in filter(None, path.split(".")):
        inner = getattr(chain[-1][0], name, None)
        if not isinstance(inner, nn.Module):
            break
        chain.append((inner, name))
    own = str(Path(torch.__file__).parent)
    called = ""
    for module, name in reversed(chain):
        try:
            file = inspect.getsourcefile(type(module).forward) or ""
            lines, first = inspect.getsourcelines(type(module).forward)
        except (OSError, TypeError):
            file = ""
        if file and not file.startswith(own):
            pattern = re.compile(rf"\bself\.{re.escape(called)}\b") if called else None
            offset = next((i for i, text in enumerate(lines) if pattern and pattern.search(text)), 0)
            return f"{file}:{first + offset}"
        called = name
    return ""


def annotate(error: BaseException, place: SourceLocation | None) -> None:
    """Add the place to the error as a note, once."""
    note = f"in {place}"
    if place is not None and note not in getattr(error, "__notes__", ()):
        error.add_note(note)

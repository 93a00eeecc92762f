"""A parameter is read once for the forward and once for the backward.

A tensor may be communicated once (HAP 4.5). For a parameter that is stored in shards this would mean that what
the forward has gathered is kept until the backward. :func:`with_second_reads` gives the backward its own reading, a
view, so that a program may gather the parameter again and keep only the shards in between (what ZeRO-3 and FSDP
do). Whether it does is the search's choice: gathering again costs seconds, keeping costs bytes.
"""

from __future__ import annotations

from dataclasses import replace

from hetspmd.trace.graph import SECOND_READ, Graph, Instruction, Ref, Tensor


def with_second_reads(graph: Graph) -> Graph:
    """The graph in which each parameter that both phases read is read again where the backward first needs it.

    Tensors keep their ids; the new ones come last. The same graph where there is nothing to read again.
    """
    tensors = list(graph.tensors)
    again: dict[int, int] = {}  # parameter -> its second reading
    first: dict[int, list[int]] = {}  # instruction -> parameters read again before it
    for parameter in graph.parameters:
        readers = graph.consumers.get(parameter.tensor, ())
        phases = {graph.instructions[i].phase for i in readers}
        if phases == {"forward", "backward"}:
            reader = next(i for i in readers if graph.instructions[i].phase == "backward")
            source = graph.tensors[parameter.tensor]
            again[parameter.tensor] = len(tensors)
            tensors.append(Tensor(len(tensors), f"{source.name} again", source.shape, source.dtype))
            first.setdefault(reader, []).append(parameter.tensor)
    if not again:
        return graph
    instructions: list[Instruction] = []
    for instruction in graph.instructions:
        for t in first.get(instruction.id, ()):
            instructions.append(
                Instruction(
                    len(instructions),
                    tensors[again[t]].name,
                    SECOND_READ,
                    (Ref(t),),
                    (),
                    (t,),
                    (again[t],),
                    "backward",
                    instruction.source,
                )
            )
        copy = instruction.reading(again) if instruction.phase == "backward" else instruction
        instructions.append(replace(copy, id=len(instructions)))
    return replace(graph, tensors=tuple(tensors), instructions=tuple(instructions))


def without_second_reads(graph: Graph) -> Graph:
    """The graph of :func:`with_second_reads` before that: the backward reads parameters as the forward does."""
    of = {graph.instructions[i].outputs[0]: parameter for i, parameter in graph.second_reads.items()}
    kept = (i.reading(of) for i in graph.instructions if i.id not in graph.second_reads)
    instructions = tuple(replace(i, id=n) for n, i in enumerate(kept))
    return replace(
        graph, tensors=graph.tensors[: min(of, default=len(graph.tensors))], instructions=instructions
    )

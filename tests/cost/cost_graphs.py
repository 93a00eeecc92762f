"""Small graphs, clusters and programs for the tests of cost and balance, built by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Device, Network
from hetspmd.placement import PARTIAL, REPLICATE, Placement, available, is_sharded
from hetspmd.program.program import Communicate, Compute, Program, Result, Step
from hetspmd.rules.rule import SUM, Cut, Factor, OpRule, Triple
from hetspmd.rules.theory import Theory, theory_of
from hetspmd.trace.graph import (
    INPUT,
    PARAMETER,
    Graph,
    Input,
    Instruction,
    Parameter,
    Ref,
    Tensor,
)


class Builder:
    """A graph and its rules, written by hand: every op names its factors itself."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.instructions: list[Instruction] = []
        self.rules: dict[int, OpRule] = {}
        self.inputs: list[Input] = []
        self.parameters: list[tuple[str, int]] = []

    def _new(self, name: str, shape: Sequence[int], dtype: str) -> int:
        self.tensors.append(Tensor(len(self.tensors), name, tuple(shape), dtype))
        return len(self.tensors) - 1

    def _add(self, name: str, op: str, inputs: Sequence[int], output: int) -> None:
        refs = tuple(map(Ref, inputs))
        self.instructions.append(
            Instruction(len(self.instructions), name, op, refs, (), tuple(inputs), (output,))
        )

    def input(self, name: str, shape: Sequence[int], dtype: str = "float32") -> int:
        t = self._new(name, shape, dtype)
        self.inputs.append(Input(name, len(self.inputs), t))
        self._add(name, INPUT, (), t)
        return t

    def parameter(self, name: str, shape: Sequence[int], dtype: str = "float32") -> int:
        t = self._new(name, shape, dtype)
        self.parameters.append((name, t))
        self._add(name, PARAMETER, (), t)
        return t

    def op(
        self, name: str, terms: str, inputs: Sequence[int], sizes: dict[str, int], *, flops: float = 0.0,
        linear: bool = False, alias: bool = False, blocked: str = "", dtype: str = "float32",
        op: str = "test.op.default",
    ) -> int:  # fmt: skip
        """An op with one letter per dim: ``"mk,kn->mn"``; letters that the output lacks are summed."""
        ins, out = terms.split("->")
        result = self._new(name, [sizes[c] for c in out], dtype)
        self._add(name, op, inputs, result)
        letters = dict.fromkeys(c for c in ins.replace(",", "") + out if c not in blocked)
        factors = []
        for c in letters:
            places = tuple(Cut(term.index(c)) if c in term else None for term in ins.split(","))
            factors.append(Factor(c, sizes[c], places, (Cut(out.index(c)) if c in out else SUM,)))
        groups = tuple(frozenset((i,)) for i in range(len(inputs))) if linear else ()
        rule = OpRule(tuple(factors), groups, flops=flops, alias=alias)
        self.rules[len(self.instructions) - 1] = rule
        return result

    def mm(self, name: str, terms: str, a: int, b: int, sizes: dict[str, int], dtype: str = "float32") -> int:
        """A contraction: 2 FLOPs per product of all sizes."""
        flops = 2.0
        for c in dict.fromkeys(terms.replace(",", "").replace("->", "")):
            flops *= sizes[c]
        return self.op(name, terms, (a, b), sizes, flops=flops, linear=True, dtype=dtype)

    def theory(self, loss: int | None, gradients: dict[int, int]) -> Theory:
        graph = Graph(
            tuple(self.tensors),
            tuple(self.instructions),
            tuple(
                Parameter((name,), t, gradients.get(t), t in gradients) for name, t in self.parameters
            ),
            (), tuple(self.inputs), (), (), (), loss, None, "", "",
        )  # fmt: skip
        return theory_of(graph, self.rules)


def mlp(batch: int = 32, width: int = 8, hidden: int = 16, layers: int = 1) -> Theory:
    """``y = relu(x U) V`` (``layers`` times), loss = sum(y), with the gradients of every U and V.

    The incoming gradient of y is an input, so that the step is forward and backward in a few instructions.
    """
    b = Builder()
    sizes = {"b": batch, "k": width, "h": hidden}
    x = b.input("x", (batch, width))
    g = b.input("g", (batch, width))
    saved: list[tuple[int, int, int, int]] = []
    for i in range(layers):
        u = b.parameter(f"u{i}", (width, hidden))
        v = b.parameter(f"v{i}", (hidden, width))
        h = b.mm(f"h{i}", "bk,kh->bh", x, u, sizes)
        a = b.op(f"a{i}", "bh->bh", (h,), sizes, flops=batch * hidden)
        saved.append((x, u, v, a))
        x = b.mm(f"y{i}", "bh,hk->bk", a, v, sizes)
    loss = b.op("loss", "bk->", (x,), sizes, flops=batch * width, linear=True)
    gradients: dict[int, int] = {}
    for i in reversed(range(layers)):
        x, u, v, a = saved[i]
        gradients[v] = b.mm(f"gv{i}", "bh,bk->hk", a, g, sizes)
        ga = b.mm(f"ga{i}", "bk,hk->bh", g, v, sizes)
        gh = b.op(f"gh{i}", "bh,bh->bh", (ga, a), sizes, flops=batch * hidden)
        gradients[u] = b.mm(f"gu{i}", "bk,bh->kh", x, gh, sizes)
        if i:
            g = b.mm(f"gx{i}", "bh,kh->bk", gh, u, sizes)
    return b.theory(loss, gradients)


def cluster(
    *rates: float, bandwidth: float = 1e9, latency: float = 1e-5, launch: float = 1e-6,
    memory_bandwidth: float = 1e11,
) -> Cluster:  # fmt: skip
    """Devices of the given FLOP/s."""
    devices = tuple(
        Device(f"d{r:g}", {"default": r}, memory_bandwidth=memory_bandwidth, launch=launch) for r in rates
    )
    return Cluster(devices, Network(bandwidth, latency) if len(rates) > 1 else None)


Chooser = Callable[[int, list[Triple]], int]


def program(
    theory: Theory, choose: Chooser, stored: Callable[[int], Placement] = lambda t: REPLICATE
) -> Program:
    """A correct program: ``choose`` picks among the rows whose preconditions hold (the always-row, last,
    holds after the collectives that make its inputs whole); each parameter is stored in the form that
    ``stored`` says."""
    graph = theory.graph
    forms: dict[int, list[Placement]] = {}
    steps: list[Step] = []

    def move(tensor: int, target: Placement) -> None:
        have = forms[tensor]
        if any(available(f, target) for f in have):
            return
        source = have[0]
        if source == PARTIAL:
            kind = "all_reduce" if target == REPLICATE else "reduce_scatter"
        elif target == REPLICATE:
            kind = "grouped_broadcast" if tensor % 2 else "all_gather"
        elif is_sharded(target):
            kind = "all_to_all"
        else:
            move(tensor, REPLICATE)
            return
        steps.append(Communicate(tensor, kind, source, target))
        have.append(target)

    for instruction in graph.instructions:
        rows = list(theory.rows[instruction.id])
        if instruction.is_source:
            (tensor,) = instruction.outputs
            want = stored(tensor) if instruction.op == PARAMETER else REPLICATE
            row = next(r for r in rows if r.post == (want,))
        else:
            legal = [
                r
                for r in rows[1:]
                if all(
                    any(available(f, p) for f in forms[t])
                    for t, p in zip(instruction.inputs, r.pre, strict=True)
                )
            ]
            row = [*legal, rows[0]][choose(instruction.id, [*legal, rows[0]])]
            for t, p in zip(instruction.inputs, row.pre, strict=True):
                move(t, p)
        steps.append(Compute(instruction.id, row))
        for t, f in zip(instruction.outputs, row.post, strict=True):
            forms[t] = [f]
    loss = None
    if graph.loss is not None:
        move(graph.loss, REPLICATE)
        loss = Result(graph.loss, REPLICATE)
    gradients = []
    for p in graph.parameters:
        if p.gradient is not None:
            move(p.gradient, stored(p.tensor))
            gradients.append(Result(p.gradient, stored(p.tensor)))
    return Program(tuple(steps), loss, (), tuple(gradients), ())


def data_parallel(theory: Theory, *, batch_axis: int | None = None) -> Program:
    """Every op divided along the batch where it can be, parameters replicated, gradients all-reduced."""
    if batch_axis is None:
        found = theory.axes.axis(theory.graph.inputs[0].tensor, 0)
        assert found is not None
        batch_axis = found.id

    def choose(instruction: int, rows: list[Triple]) -> int:
        for i, row in enumerate(rows):
            index = theory.rows[instruction].index(row)
            if theory.row_axes[instruction][index] == batch_axis:
                return i
        for i, row in enumerate(rows):
            if PARTIAL in row.pre:
                return i
        return len(rows) - 1

    return program(theory, choose)


def random_program(theory: Theory, seed: int) -> Program:
    """Random triples, random stored forms; always correct."""
    rng = random.Random(seed)
    forms: dict[int, Placement] = {}
    for p in theory.graph.parameters:
        rows = theory.rows[theory.graph.producers[p.tensor]]
        forms[p.tensor] = rng.choice(rows).post[0]
    return program(theory, lambda _, rows: rng.randrange(len(rows)), lambda t: forms[t])

"""Kinds of collectives are records: what the rest of the package knows of a kind, it takes from there."""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast, get_args

import cost_graphs
import pytest
import torch

import workbench
from hetspmd.cluster import collective_kinds
from hetspmd.cluster.collective_buffers import Buffers, Carried, HeldBytes
from hetspmd.cluster.collective_kinds import KINDS, CollectiveKind, Kind, Terms, end_of, kinds_between
from hetspmd.cluster.curves import TERMS, Curve
from hetspmd.cost.collective_costs import MoveForm
from hetspmd.cost.memory import memory_profile
from hetspmd.cost.model import CostModel
from hetspmd.dist import collectives
from hetspmd.dist.collectives import STARTS, Start
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.random import Randomness
from hetspmd.dist.runtime import Runtime
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import ProofError
from hetspmd.placement import PARTIAL, REPLICATE, before_cut, shard
from hetspmd.program.buckets import Bucket, coalesces, transfer_text
from hetspmd.program.checker import check
from hetspmd.program.lengths import Lengths
from hetspmd.program.program import Communicate, Program, communication_text, communications

from program_builder import data_parallel, uneven  # isort: skip  # found by workbench
from small_models import case  # isort: skip  # as above

ROOT: Final = Path(__file__).parents[2]
PLACEMENTS: Final = {
    "partial": "partial",
    "replicated": "replicated",
    "shard": "shard(d)",
    "before_cut": "shard(d) of another segment",
}


def test_all_know_the_same_kinds() -> None:
    """The names, the records, the starts, and the list of its own that the checker has."""
    assert get_args(Kind) == tuple(KINDS) == tuple(STARTS)
    assert all(kind.name == name for name, kind in KINDS.items())
    checker = (ROOT / "python" / "hetspmd" / "program" / "checker.py").read_text(encoding="utf-8")
    assert re.findall(r'^ +"(\w+)": ', checker, re.MULTILINE) == list(KINDS)
    assert len({kind.text for kind in KINDS.values()}) == len(KINDS)
    assert {k for k, kind in KINDS.items() if kind.coalesces} == {k for k, s in STARTS.items() if s.several}


def test_records_are_sound() -> None:
    for kind in KINDS.values():
        assert set(kind.terms) <= set(TERMS)
        priced = {term for term, number in kind.formula(4)._asdict().items() if number}
        assert priced
        if kind.terms:
            assert priced <= set(kind.terms), "a curve can be what the formula is"
        for field in ("measured_as", "lone"):
            other: Kind | None = getattr(kind, field)
            if other is not None:
                assert KINDS[other].target == kind.target
                assert getattr(KINDS[other], field) is None, "one step leads to it"
        assert not kind.in_place or kind.source == "partial"


def test_ends_and_arguments() -> None:
    assert [end_of(p) for p in (REPLICATE, PARTIAL, shard(0), shard(3), before_cut(1))] == [
        "replicated", "partial", "shard", "shard", "before_cut"
    ]  # fmt: skip
    assert kinds_between("shard", "shard") == ("all_to_all",)
    assert kinds_between("replicated", "shard") == ()
    cuts = [(0, (1, 2)), (1, (3, 4))]
    assert KINDS["all_reduce"].arguments([]) == ()
    assert KINDS["reduce_scatter"].arguments(cuts[:1]) == (0, (1, 2))
    assert KINDS["all_to_all"].arguments(cuts) == (0, 1, (1, 2), (3, 4))
    assert KINDS["rebalance"].arguments([(1, (1, 2)), (1, (3, 4))]) == (1, (1, 2), (3, 4))


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_nothing_is_held_of_an_empty_tensor(kind: CollectiveKind) -> None:
    if kind.buffers is not None:
        for spare in (False, True):
            held = kind.buffers(Carried(world=3, nbytes=0, largest=0, spare=spare))
            assert held.flight == held.end == HeldBytes()
            assert held.freed == 0


def table() -> list[str]:
    """The first of the two tables of kinds of docs/collectives.md."""
    head = "| kind | shown as | from | to | one holder | buckets | in place | stands in | measured terms |"
    rows = [head, "|" + " --- |" * 9]
    for name, kind in KINDS.items():
        cells = [
            f"`{name}`",
            kind.text,
            PLACEMENTS[kind.source],
            PLACEMENTS[kind.target],
            f"`{kind.lone}`" if kind.lone else "-",
            "yes" if kind.coalesces else "-",
            "yes" if kind.in_place else "-",
            f"`{kind.measured_as}`" if kind.measured_as else "-",
            ", ".join(kind.terms) or "-",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def test_the_page_has_every_kind_as_its_record_says() -> None:
    page = (ROOT / "docs" / "collectives.md").read_text(encoding="utf-8")
    wanted = "\n".join(table())
    assert f"\n{wanted}\n\n" in page, f"write:\n{wanted}"


def formula(text: str, **values: float) -> float:
    """The value of ``2 L + (n - 1) M E / b``, in which what stands side by side is multiplied."""
    tokens = re.findall(r"\w+|[-+/()]", text)
    parts = [str(values.get(token, token)) for token in tokens]
    for at in range(len(tokens) - 1, 0, -1):
        if re.match(r"[\w(]", tokens[at]) and re.match(r"[\w)]", tokens[at - 1]):
            parts.insert(at, "*")
    return float(eval(" ".join(parts)))


def test_the_page_has_seconds_and_bytes_as_the_records_say() -> None:
    """Of the second table: its formulas, with numbers for their letters."""
    page = (ROOT / "docs" / "collectives.md").read_text(encoding="utf-8")
    rows = page.split("| kind | seconds, unmeasured |")[1].split("\n\n")[0].splitlines()[2:]
    written = {cells[1].strip("`"): cells[2:5] for cells in ([c.strip() for c in r.split("|")] for r in rows)}
    assert list(written) == list(KINDS)
    values = {"n": 4, "k": 3, "L": 1e-4, "b": 1e8, "E": 4800, "M": 0.5, "X": 0.375, "s": 0.5, "t": 0.125}
    n, size, s, t = 4, 4800, 0.5, 0.125
    for name, (seconds, flight, end) in written.items():
        kind = KINDS[cast(Kind, name)]
        terms = kind.formula(n)
        latencies = terms.latency + terms.per_shard * values["k"]
        sent = terms.per_byte + terms.per_largest * values["M"] + terms.per_exchange * values["X"]
        assert formula(seconds, **values) == pytest.approx(latencies * 1e-4 + sent * size / 1e8), name
        made = kind.buffers or (lambda _: Buffers())
        held = made(Carried(world=n, nbytes=size, largest=size // 2, moved=True))
        share = t if kind.scatters else s
        for text, part in ((flight, held.flight), (end, held.end)):
            assert formula(text, **values) == part.whole + part.sharded * share + part.target * t, name


def steps() -> str:
    """The part of CONTRIBUTING.md that adds a kind."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return page.split("## Another change: a kind of collectives\n")[1].split("\n## ")[0]


def blocks() -> list[str]:
    """Its Python: the record, its buffers, the start, the start's row, the checker's row."""
    found = re.findall(r"^ *```python\n(.*?)^ *```", steps(), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in found]


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Kind:
    """The kind of CONTRIBUTING.md, added by its own words."""
    record, buffers, start, row, _ = blocks()
    names: dict[str, Any] = dict(vars(collective_kinds))
    exec(buffers, names)
    kind = cast(CollectiveKind, eval(record, names))
    running: dict[str, Any] = dict(vars(collectives))
    exec(start, running)
    ((key, made),) = cast(dict[str, Start], eval(f"{{{row}}}", running)).items()
    assert key == kind.name
    monkeypatch.setitem(KINDS, kind.name, kind)
    monkeypatch.setitem(STARTS, key, made)
    return kind.name


def test_the_example_names_what_there_is() -> None:
    text = " ".join(steps().split())
    files = set(re.findall(r"(?:python|tests|docs|benches)/[\w/]+\.(?:py|md)", text))
    assert len(files) >= 8
    assert [name for name in sorted(files) if not (ROOT / name).exists()] == []
    sources = {
        name: (ROOT / name).read_text(encoding="utf-8") for name in files if name.startswith("python/")
    }
    assert len(sources) == 3, "a kind is a matter of three files"
    own = "\n".join(sources.values())
    for name in (
        "Kind = ",
        "_RECORDS: ",
        "STARTS: ",
        "def arguments(",
        "_WHOLE",
        "right = {",
        "measured_as: ",
        "lone: ",
    ):
        assert name in own
    fields = set(CollectiveKind.__dataclass_fields__)
    assert {"measured_as", "lone", "in_place", "coalesces", "buffers"} <= fields & set(
        re.findall(r"\w+", text)
    )
    row = blocks()[4].split(":", 1)[1].strip()
    assert f'"all_gather": {row}' in sources["python/hetspmd/program/checker.py"]


def test_text_and_place_in_the_search(added: Kind) -> None:
    step = Communicate(0, added, shard(1), REPLICATE)
    assert communication_text(step, "e7") == "Exchange-Gather(e7, 1)"
    assert transfer_text(Bucket((step, step)), ["w"]) == "Exchange-Gather(w, w)"
    assert communications((0,), summable=False)[-1] == (shard(0), REPLICATE, added)
    assert kinds_between("shard", "replicated")[0] == "all_gather", "the first of equal ones is taken"


def test_seconds(added: Kind) -> None:
    theory = cost_graphs.mlp(batch=12, width=6, hidden=10)
    tensor = theory.graph.parameters[0].tensor
    nbytes = theory.graph.tensors[tensor].nbytes
    cluster = cost_graphs.cluster(2e9, 1e9, 1e9)
    model = CostModel(theory, cluster)
    axis = theory.axes.axis(tensor, 0)
    assert axis is not None
    assert cluster.network is not None
    latency, bandwidth = cluster.network.latency, cluster.network.bandwidth
    form = model.move_form(tensor, shard(0), REPLICATE, added)
    assert form == MoveForm(latency, per_largest=2 * nbytes / bandwidth, axis=axis.id, latency=latency)
    assert KINDS[added].formula(3) == Terms(latency=1, per_largest=2)
    assert not coalesces(theory.graph, tensor, added, 1e9)
    # The curve of the kind that stands in for it, then its own.
    other, own = (Curve(k, 3, latency=s, per_largest=1e-6) for k, s in (("all_gather", 1e-3), (added, 3e-3)))
    for curves, wanted in (((other,), 1e-3), ((other, own), 3e-3)):
        form = CostModel(theory, replace(cluster, curves=curves)).move_form(
            tensor, shard(0), REPLICATE, added
        )
        assert (form.latency, form.per_largest) == (wanted, 1e-6 * nbytes)


def gathered_by(program: Program, kind: Kind) -> Program:
    """The program with another kind for each gather."""
    return replace(
        program,
        steps=tuple(
            replace(step, kind=kind) if isinstance(step, Communicate) and KINDS[step.kind].gathers else step
            for step in program.steps
        ),
    )


def test_bytes(added: Kind) -> None:
    theory = cost_graphs.mlp(batch=12, width=6, hidden=10)
    plain = next(
        program
        for program in (cost_graphs.random_program(theory, seed) for seed in range(50))
        if any(
            isinstance(s, Communicate) and s.source == shard(0) and s.target == REPLICATE
            for s in program.steps
        )
    )
    lengths = Lengths(2, tuple((a.units - 1, 1) for a in theory.axes.axes))
    base = memory_profile(theory, gathered_by(plain, "grouped_broadcast"), lengths).held
    held = memory_profile(theory, gathered_by(plain, added), lengths).held
    sent = held - base
    for at, step in enumerate(plain.steps):
        if isinstance(step, Communicate) and KINDS[step.kind].gathers:
            tensor = theory.graph.tensors[step.tensor]
            axis = theory.axes.sharded(step.tensor, step.source)
            assert axis is not None
            part = [tensor.nbytes * units // axis.units for units in lengths.units[axis.id]]
            assert sent[at].tolist() == [2 * nbytes for nbytes in part], "the slice, for each of two ranks"
        else:
            assert not sent[at].any()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_in_the_simulation(added: Kind, world: int) -> None:
    c = case("mlp")
    graph = c.theory.graph
    inputs = [c.batch[i.path] for i in graph.inputs]
    program = gathered_by(data_parallel(c.theory, graph.inputs[0].tensor, sharded_parameters=True), added)
    assert sum(isinstance(s, Communicate) and s.kind == added for s in program.steps) >= 3
    want = workbench.single_device(c.theory, c.model, inputs)
    for seed in range(3):
        lengths = uneven(c.theory, world, seed)
        assert workbench.simulated_error(c.theory, program, lengths, c.model, inputs, want) < 1e-9


def test_collectives_by_brute_force(added: Kind) -> None:
    def body(comm: Communicator) -> None:
        runtime = Runtime(comm, Randomness(0, comm.rank, torch.device("cpu")))
        for dim in (0, 1):
            for dtype in (torch.float32, torch.bool, torch.complex64):
                whole = torch.arange(30).view(6, 5).to(dtype)
                for first in range(whole.shape[dim] + 1):
                    extents = (first, 0, whole.shape[dim] - first)
                    part = torch.split(whole, extents, dim)[comm.rank]
                    assert torch.equal(runtime.start(added, part, dim, extents).wait(), whole)

    run_ranks(3, body)


def test_the_checker_takes_nothing_from_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    name = cast(Kind, "unproved")
    monkeypatch.setitem(KINDS, name, replace(KINDS["ring_gather"], name=name))
    c = case("mlp")
    program = data_parallel(c.theory, c.theory.graph.inputs[0].tensor, sharded_parameters=True)
    assert check(c.theory, gathered_by(program, "ring_gather")) > 0
    with pytest.raises(ProofError, match=r"unproved of .*: it cannot turn"):
        check(c.theory, gathered_by(program, name))

"""The pass that computes activations again: it changes no number, and the backward reads less of the forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zoo
from hetspmd.errors import ExampleError, OptionError
from hetspmd.trace.blocks import as_in, check_recompute, chooser, outermost, repeating
from hetspmd.trace.compat.joint import current_annotations
from hetspmd.trace.evaluate import local_op
from hetspmd.trace.graph import Graph
from hetspmd.trace.recompute import Block, recomputed
from hetspmd.trace.recompute_savings import copying_instructions, saved_bytes
from hetspmd.trace.trace import trace
from recomputing import Blocks, batch, largest_difference, on_one_device, saved, theory_of
from workbench import traced

QUICK = {"gpt2", "bert-eager", "llama", "bert-moe"}
WITH_BLOCKS = (
    "bert", "bert-eager", "gpt2", "llama", "vit", "resnet50", "swin", "mobilenet-v2", "convnext", "opt", "qwen3",
    "gemma2", "segformer", "shufflenet", "efficientnet-b0", "bert-moe",
)  # fmt: skip
BLOCKS = {"bert-moe": "layers.*"}
"""The two layers are not alike."""
MODELS = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in WITH_BLOCKS]


def graph_of(recompute: str | tuple[str, ...], model: nn.Module | None = None) -> Graph:
    return trace(model or Blocks(), (), batch(), recompute=chooser(recompute))


def random_ids(graph: Graph) -> list[int]:
    calls = [i for i in graph.instructions if not i.is_source and not i.op.startswith("hetspmd.")]
    return [i.id for i in calls if torch.Tag.nondeterministic_seeded in local_op(i.op).tags]


@pytest.mark.parametrize("how", ["all", "selective"])
@pytest.mark.parametrize("name", MODELS)
def test_every_block_of_a_model_again(name: str, how: str) -> None:
    t = traced(name)
    theory = theory_of(t.model, t.example, BLOCKS.get(name, how) if how == "all" else how, t.loss)
    assert len(theory.graph.recomputed) >= (2 if how == "all" else 1)
    want, got = (on_one_device(each, t.model, t.example) for each in (t.theory, theory))
    assert largest_difference(got, want) < 1e-12
    assert sum(saved_bytes(theory.graph).values()) > 0


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4, 1.0])
def test_the_same_numbers_are_drawn_and_decided(dropout: float, statistics: bool) -> None:
    model = Blocks(dropout=dropout, statistics=statistics)
    plain, theory = (theory_of(model, batch(), how) for how in ("none", "all"))
    assert [b.block for b in theory.graph.recomputed] == ["h.0", "h.1", "h.2"]
    assert random_ids(plain.graph) == random_ids(theory.graph), "drawn once, in the forward"
    want, got = (on_one_device(each, model, batch()) for each in (plain, theory))
    assert largest_difference(got, want) < 1e-12
    assert [b.updated for b in theory.graph.buffers] == [b.updated for b in plain.graph.buffers]
    decided = [i for i in theory.graph.instructions if i.op.startswith("aten.topk") and i.phase == "backward"]
    read = {t for i in theory.graph.instructions for t in i.inputs}
    assert all(i.outputs[1] not in read for i in decided), "which are the largest is held"


def test_parameters_are_read_again_for_the_copies() -> None:
    plain, graph = graph_of("none"), graph_of("all")
    biases = {p.name for p in graph.parameters if p.tensor in graph.second_reads.values()}
    assert "h.1.up.bias" in biases
    assert "h.1.up.bias" not in {p.name for p in plain.parameters if p.tensor in plain.second_reads.values()}


def test_what_is_held_is_what_enters_blocks() -> None:
    """Of each block its input, what leaves it, what is random or decided; not what it computes on the way."""
    plain, graph = graph_of("none"), graph_of("all")
    again = {t for block in graph.recomputed for t, _ in block.tensors}
    assert again.isdisjoint(saved(graph))
    assert len(saved(graph)) < len(saved(plain)) / 2
    assert [t.name for t in graph.tensors[: len(plain.tensors) - len(plain.second_reads)]] == [
        t.name for t in plain.tensors[: len(plain.tensors) - len(plain.second_reads)]
    ]


def test_copies_stand_where_the_backward_needs_them() -> None:
    """The last block's come first, and none before the gradients of the block behind it have begun."""
    graph = graph_of("all")
    blocks = list(dict.fromkeys(copying_instructions(graph).values()))
    assert blocks == ["h.2", "h.1", "h.0"]
    first = {b: min(i for i, of in copying_instructions(graph).items() if of == b) for b in blocks}
    for behind, block in (("h.2", "h.1"), ("h.1", "h.0")):
        own = {t for b in graph.recomputed if b.block == behind for _, t in b.tensors}
        readers = [i.id for i in graph.instructions if not own.isdisjoint(i.inputs)]
        assert max(readers) > first[behind]
        assert first[block] > min(readers)
    for instruction in graph.instructions:
        made = {t for i in graph.instructions[: instruction.id] for t in i.outputs}
        assert made.issuperset(instruction.inputs)


def test_a_mask_that_the_backward_makes_is_put_off() -> None:
    """``relu``'s mask is of the backward and stands early: it must not compute the block again there."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = nn.ModuleList(
                nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2)
            )

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            for block in self.h:
                x = x + block(x).where(x > 0, 0.5 * x)
            return F.cross_entropy(torch.cat([x, x[:, :1]], 1), labels)

    model = Net().double()
    plain, theory = (theory_of(model, batch(), how) for how in ("none", "h.*"))
    want, got = (on_one_device(each, model, batch()) for each in (plain, theory))
    assert largest_difference(got, want) < 1e-12
    after = theory.graph.consumers[theory.graph.tangent or 0][0]
    assert min(copying_instructions(theory.graph)) > after


def test_a_result_of_the_step_is_held() -> None:
    class Net(Blocks):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            h = torch.tanh(self.first(x))
            inside = F.gelu(self.h[0].up(h))
            return F.cross_entropy(self.head(self.h[0].down(inside)), labels), inside

    graph = graph_of(("h.*",), Net())
    outputs = {o.tensor for o in graph.outputs}
    assert outputs.isdisjoint(t for block in graph.recomputed for t, _ in block.tensors)


def test_globs_and_words() -> None:
    assert [b.block for b in graph_of(("h.1",)).recomputed] == ["h.1"]
    assert [b.block for b in graph_of("h.*").recomputed] == ["h.0", "h.1", "h.2"]
    assert [b.block for b in graph_of(("h.2", "h.0")).recomputed] == ["h.0", "h.2"]
    assert not graph_of("none").recomputed
    assert not graph_of("checkpoints").recomputed
    assert [b.block for b in graph_of("h").recomputed] == ["h"]
    with pytest.raises(OptionError, match=r"recompute='hh\.\*': no module .* matches it; near are h\.\d"):
        graph_of("hh.*")
    for wrong in (3, "", (), ("auto", "h.*"), [1], {"h": 1}):
        with pytest.raises(
            OptionError, match="give 'checkpoints', 'none', 'all', 'selective', 'auto', or globs"
        ):
            check_recompute(wrong)
    assert check_recompute(["h.*"]) == ("h.*",)
    assert check_recompute("auto") == "auto"


def test_own_regions_and_modules_together() -> None:
    class Net(Blocks):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.first(x))
            h = checkpoint(lambda z: self.h[1](self.h[0](z)), h, use_reentrant=False)
            return F.cross_entropy(self.head(self.h[2](h)), labels)

    model = Net()
    assert [b.block for b in graph_of("checkpoints", model).recomputed] == ["checkpoint 0"]
    assert [b.block for b in graph_of("all", model).recomputed] == ["checkpoint 0", "h.2"]
    assert not graph_of("none", model).recomputed
    like = graph_of(("h.2",), model)
    again = trace(model, (), batch(9), recompute=as_in(like))
    assert (
        [b.block for b in again.recomputed] == [b.block for b in like.recomputed] == ["checkpoint 0", "h.2"]
    )


class PartlyInRegions(nn.Module):
    """A layer of which a part is a region, which has another one in itself."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.up, self.down = layer.up, layer.down

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.up(h)).tanh()

    def outer(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.down(checkpoint(self.inner, torch.cos(h), use_reentrant=False)))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h.exp() + checkpoint(self.outer, h.sin(), use_reentrant=False)


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("checkpoints", ["checkpoint 0", "checkpoint 1"]),
        ("none", []),
        ("all", ["checkpoint 0", "checkpoint 1", "h.0", "h.1", "h.2"]),
        ("h.0", ["checkpoint 0", "checkpoint 1", "h.0"]),
        (
            "selective",
            ["checkpoint 0", "checkpoint 1", "h.0 (selective)", "h.1 (selective)", "h.2 (selective)"],
        ),
    ],
)
def test_regions_inside_of_others_stay(how: str, wanted: list[str]) -> None:
    model = Blocks()
    model.h[0] = PartlyInRegions(model.h[0])
    plain, theory = theory_of(model, batch(), "none"), theory_of(model, batch(), how)
    graph = theory.graph
    assert sorted(b.block for b in graph.recomputed if b.block != "the rest (selective)") == wanted
    want, got = (on_one_device(each, model, batch()) for each in (plain, theory))
    assert largest_difference(got, want) < 1e-12
    again = trace(model, (), batch(9), recompute=as_in(graph))
    assert [b.block for b in again.recomputed] == [b.block for b in graph.recomputed]
    assert len(again.instructions) == len(graph.instructions)


def test_blocks_that_overlap() -> None:
    """Of what lies in two of which neither contains the other the first counts."""
    graph = graph_of("none")
    first, second = (block.tensors for block in repeating(graph)[:2])
    part = frozenset(sorted(second)[:3])
    made = recomputed(graph, [Block("a", first | part), Block("b", second), Block("c", first)])
    in_block = {b.block: {t for t, _ in b.tensors} for b in made.recomputed}
    assert in_block["b"].isdisjoint(part)
    assert in_block["c"] <= first


def test_the_pass_on_a_graph_with_second_readings() -> None:
    """As ``auto`` does it: the same graph as if the trace had done it."""
    plain, made = graph_of("none"), graph_of("all")
    later = recomputed(plain, repeating(plain))
    assert later.instructions == made.instructions
    assert later.tensors == made.tensors
    assert later.recomputed == made.recomputed
    assert recomputed(plain, []).instructions == plain.instructions


def test_repeating_blocks_of_models() -> None:
    found = {
        name: [b.name for b in repeating(traced(name).theory.graph)] for name in ("gpt2", "resnet50", "swin")
    }
    assert found["gpt2"] == ["transformer.h.0", "transformer.h.1"]
    assert [n for n in found["resnet50"] if n.startswith("layer3")] == [f"layer3.{i}" for i in range(6)]
    assert len(found["resnet50"]) == 16
    assert found["swin"]
    assert not repeating(traced("lstm").theory.graph)


def test_what_is_cheap_leaves_products_with_parameters_held() -> None:
    graph = graph_of("selective")
    assert [b.block for b in graph.recomputed][:3] == [f"h.{i} (selective)" for i in range(3)]
    copies = [graph.instructions[i] for i in copying_instructions(graph)]
    assert copies
    assert not [i for i in copies if i.op.split(".")[1] in ("addmm", "mm")]
    again = trace(Blocks(), (), batch(3), recompute=as_in(graph))
    assert [b.block for b in again.recomputed] == [b.block for b in graph.recomputed]
    whole, part = Block("a", frozenset({1, 2})), Block("b", frozenset({1, 2}), frozenset({1}))
    assert outermost([part, whole]) == [whole]


def test_blocks_in_others_are_left_out() -> None:
    blocks = [Block("a", frozenset({1, 2})), Block("b", frozenset({2})), Block("c", frozenset({3}))]
    assert [b.name for b in outermost(blocks)] == ["a", "c"]


def test_a_deep_block() -> None:
    """No recursion: a block of more instructions than Python's stack has frames."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        for _ in range(1500):
            x = torch.sin(x)
        return x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return checkpoint(forward, self.first(x), use_reentrant=False).square().mean()

    graph = trace(Net().double(), (), batch())
    assert len(graph.recomputed[0].tensors) > 1400


def test_hugging_face_checkpointing() -> None:
    model, example, _ = zoo.gpt2(dropout=0.2)
    model.double().train()
    wanted = theory_of(model, example, "none")
    model.config.use_cache = False
    model.activation_checkpointing_enable()
    theory = theory_of(model, example, "checkpoints")
    assert [b.block for b in theory.graph.recomputed] == ["checkpoint 0", "checkpoint 1"]
    plain = theory_of(model, example, "none")
    assert not plain.graph.recomputed
    want, got = (on_one_device(each, model, example) for each in (wanted, theory))
    assert random_ids(plain.graph) == random_ids(theory.graph)
    assert largest_difference(got, want) < 1e-12


class _Region(nn.Module):
    """A region in a module between two that are in none; it may write to a buffer, or fail."""

    def __init__(self, what: str, *, reentrant: bool) -> None:
        super().__init__()
        self.what, self.reentrant = what, reentrant
        self.before, self.inside, self.behind = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def region(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inside(x))
        if self.what == "fails":
            raise ValueError("no more")
        return self.norm(hidden) if self.what == "writes" else torch.sin(hidden)

    def forward(self, x: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.region, torch.tanh(self.before(x)), use_reentrant=self.reentrant)
        return torch.tanh(self.behind(hidden)).pow(2).sum()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("what", ["plain", "writes", "fails"])
def test_a_region_ends_where_it_ends(what: str, reentrant: bool) -> None:
    """A trace that is begun again (of a model that writes to buffers), or ends, in the middle of a region leaves
    nothing of it to what is traced afterwards."""
    model = nn.Sequential(_Region(what, reentrant=reentrant))
    rows = {"x": torch.randn(6, 8)}
    want = graph_of("checkpoints", nn.Sequential(Blocks())[0])
    if what == "fails":
        with pytest.raises(ExampleError, match="no more"):
            trace(model, (rows["x"],), {}, recompute=chooser("checkpoints"))
    else:
        graph = trace(model, (rows["x"],), {}, recompute=chooser("checkpoints"))
        (block,) = graph.recomputed
        again = {graph.producers[tensor] for tensor, _ in block.tensors}
        (behind,) = (t.id for t in graph.tensors if t.name == "0.behind.weight")
        before = next(i for i in graph.instructions if i.op == "aten.tanh.default")
        first = next(
            i.id for i in graph.instructions if behind in {graph.parameter_of.get(t) for t in i.inputs}
        )
        assert before.id not in again
        assert max(again) < first, "what stands behind the region is not computed again"
    assert not current_annotations()
    assert graph_of("checkpoints", nn.Sequential(Blocks())[0]) == want

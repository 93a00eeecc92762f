"""HAP's evaluation: the models are the paper's, machines share links, ablations leave out what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hap_testbed as hap
import reproduction
from hap_testbed import BENCHMARKS, GROUPED, P100, V100, cluster_of
from hetspmd.cost.model import CostModel
from hetspmd.placement import shard
from hetspmd.program.program import Communicate
from hetspmd.search import constraints as known


@pytest.mark.parametrize("b", BENCHMARKS, ids=lambda b: b.name)
def test_models_have_the_papers_parameters(b: hap.Benchmark) -> None:
    devices = 2
    with torch.device("meta"):
        model, example = b.build(b.rows * devices, devices)
    constant, per_device = b.parameters
    found = sum(p.numel() for p in model.parameters()) / 2**20
    assert found == pytest.approx(constant + per_device * devices, rel=0.02)
    assert {t.shape[0] for t in example.values()} == {b.rows * devices}


def test_the_gpus_of_a_machine_share_its_link() -> None:
    theory = hap.at_scale(BENCHMARKS[0], 16)
    cluster = cluster_of((V100, P100), 2)
    costs = CostModel(theory, cluster)
    images = next(i.tensor for i in theory.graph.inputs if theory.graph.tensors[i.tensor].dtype == "float32")
    form = costs.move_form(images, shard(0), shard(0), "all_to_all")
    assert cluster.network is not None
    link = theory.graph.tensors[images].nbytes / cluster.network.bandwidth
    # Of 2 GPUs' traffic to 15 others, that to the 14 on other machines leaves over one link.
    assert form.per_exchange == pytest.approx(2 * 14 / 15 * link)
    assert [c.devices for c in cluster.part(range(4)).curves if c.kind == "all_to_all"] == [4]


@pytest.mark.slow
def test_ablations_leave_out_what_they_say() -> None:
    theory = hap.at_scale(BENCHMARKS[0], 8)
    cluster = cluster_of((V100, P100), 1)
    everything = hap.synthesized(theory, cluster)
    assert hap.uses_of_sfb(everything) > 0
    limited = hap.synthesized(theory, cluster, without=GROUPED, sfb=False)
    assert hap.uses_of_sfb(limited) == 0
    assert hap.uses_of_grouped(limited.program) == 0
    assert everything.seconds <= limited.seconds
    assert len(hap.gradient_products(theory)) == 19, "16 convolutions and 3 linear layers"


@pytest.mark.slow
def test_experts_travel_in_the_deepspeed_like_program() -> None:
    cluster = cluster_of((("a100", 1), ("p100", 1)), 2)
    theory = hap.theory_of(lambda: hap.bert_moe(16, 4, 4))
    found = hap.forced(theory, cluster, hap.deepspeed_like(theory), equal=True)
    assert hap.experts_placed(found) == (1, 1, 1, 1)
    weights = {p.tensor for p in theory.graph.parameters if ".w1_E" in p.name or ".w2_E" in p.name}
    moved = [s for s in found.program.steps if isinstance(s, Communicate)]
    assert not any(s.tensor in weights for s in moved)
    assert any(s.kind == "all_to_all" for s in moved)
    whole = hap.forced(theory, cluster, known.data_parallel(theory), equal=True)
    assert max(found.cost.memory_bytes) < max(whole.cost.memory_bytes)


def test_tables_and_chart() -> None:
    lines, series = reproduction.heterogeneous(BENCHMARKS[:1], scales=(1,))
    found = series["VGG19", 8]
    assert found["hetspmd"].seconds <= min(j.seconds for j in found.values())
    assert lines[2].startswith("| VGG19 | 8 |")
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    assert reproduction.chart(series).count("<rect") == 1 + 2 * len(reproduction.ARMS)
    text = "before\n<!-- x -->\nold\n<!-- end of x -->\nafter\n"
    assert reproduction.replaced(text, "x", ["new"]) == text.replace("old", "new")
    with pytest.raises(ValueError, match="no marks"):
        reproduction.replaced(text, "y", [])


def test_the_document_has_every_experiment() -> None:
    text = (Path(reproduction.__file__).parents[1] / "docs/reproduction.md").read_text(encoding="utf-8")
    for name in reproduction.EXPERIMENTS:
        assert reproduction.replaced(text, name, []) != text, f"{name} has no table"

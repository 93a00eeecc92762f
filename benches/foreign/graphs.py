"""Graph networks of PyTorch Geometric: node and graph classification over fixed edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foreign.registry import Sample, model, without_dropout

NODES, EDGES, FEATURES, CLASSES = 24, 60, 12, 5


def edges() -> Tensor:
    """Random edges, each node with one to itself."""
    return torch.cat([torch.randint(0, NODES, (2, EDGES)), torch.arange(NODES).expand(2, NODES)], 1)


def classified(network: nn.Module, x: Tensor, edge_index: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of every node."""
    return F.cross_entropy(network(x, edge_index), labels)


def _batches() -> list[tuple[Tensor, ...]]:
    index, labels = edges(), torch.randint(0, CLASSES, (NODES,))
    return [(torch.randn(NODES, FEATURES), index, labels) for _ in range(2)]


def _nodes(name: str, make: Callable[[Any], nn.Module]) -> None:
    def built() -> Sample:
        import torch_geometric

        return Sample(without_dropout(make(torch_geometric.nn)).train(), _batches(), classified)

    model(f"pyg-{name}", "torch_geometric", built)


class Layer(nn.Module):
    """A convolution and a linear layer."""

    def __init__(self, conv: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.conv, self.out = conv, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.out(self.conv(x, edge_index).relu())
        return out


_nodes("gcn", lambda g: g.GCN(FEATURES, 16, 2, CLASSES))
_nodes("gcn-without-loops", lambda g: g.GCN(FEATURES, 16, 2, CLASSES, add_self_loops=False))
_nodes("gat-without-loops", lambda g: g.GAT(FEATURES, 16, 2, CLASSES, add_self_loops=False))
_nodes("sage", lambda g: g.GraphSAGE(FEATURES, 16, 2, CLASSES))
_nodes("gat", lambda g: g.GAT(FEATURES, 16, 2, CLASSES, heads=2))
_nodes("gatv2", lambda g: g.GAT(FEATURES, 16, 2, CLASSES, v2=True))
_nodes("gin", lambda g: g.GIN(FEATURES, 16, 2, CLASSES))
_nodes("pna", lambda g: g.PNA(FEATURES, 16, 1, CLASSES, aggregators=["mean", "max"], scalers=["identity"],
                              deg=torch.bincount(torch.arange(8))))  # fmt: skip
_nodes("edge-cnn", lambda g: g.EdgeCNN(FEATURES, 16, 1, CLASSES))
_nodes("cheb", lambda g: Layer(g.ChebConv(FEATURES, 16, 2)))
_nodes("tag", lambda g: Layer(g.TAGConv(FEATURES, 16)))
_nodes("arma", lambda g: Layer(g.ARMAConv(FEATURES, 16)))
_nodes("sgc", lambda g: Layer(g.SGConv(FEATURES, 16, K=2)))
_nodes("graph-conv", lambda g: Layer(g.GraphConv(FEATURES, 16)))
_nodes("gated", lambda g: Layer(g.GatedGraphConv(16, 2)))
_nodes("transformer", lambda g: Layer(g.TransformerConv(FEATURES, 8, heads=2)))
_nodes("film", lambda g: Layer(g.FiLMConv(FEATURES, 16)))
_nodes("appnp", lambda g: Layer(g.Sequential("x, e", [
    (nn.Linear(FEATURES, 16), "x -> x"), (g.APPNP(2, 0.1), "x, e -> x")])))  # fmt: skip


class Pooled(nn.Module):
    """A graph classifier: two convolutions, the mean of each graph's nodes."""

    def __init__(self, g: Any) -> None:
        super().__init__()
        self.first, self.second = g.GCNConv(FEATURES, 16), g.GCNConv(16, 16)
        self.pool, self.out = g.global_mean_pool, nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, size: int) -> Tensor:
        x = self.second(self.first(x, edge_index).relu(), edge_index).relu()
        out: Tensor = self.out(self.pool(x, batch, size))
        return out


def _pooled() -> Sample:
    import torch_geometric

    def loss(m: nn.Module, x: Tensor, e: Tensor, batch: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(m(x, e, batch, 4), labels)

    batch, labels = torch.arange(4).repeat_interleave(NODES // 4), torch.randint(0, CLASSES, (4,))
    return Sample(Pooled(torch_geometric.nn), [(torch.randn(NODES, FEATURES), edges(), batch, labels)], loss)


model("pyg-graph-classifier", "torch_geometric", _pooled)

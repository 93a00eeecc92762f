"""What a model or batch may not hold is refused before the trace, by name and with the line to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import hetspmd
from hetspmd.errors import ExampleError, TraceError
from hetspmd.trace.trace import trace
from nets import Net, parameter, traced

X = torch.randn(6, 4)


def applied(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.part(x).pow(2).mean()


def _in_place_compiled() -> nn.Module:
    return torch.compile(nn.Linear(4, 4))


def _scripted() -> nn.Module:
    return torch.jit.trace(nn.Linear(4, 4), X, check_trace=False)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    ("part", "message"),
    [
        (lambda: nn.SyncBatchNorm(4), r"part of Net is a SyncBatchNorm; use nn.BatchNorm1d"),
        (lambda: nn.Sequential(nn.SyncBatchNorm(4)), r"part.0 of Net is a SyncBatchNorm"),
        (lambda: nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(4)), "sees the global batch"),
        (lambda: nn.DataParallel(nn.Linear(4, 4)), r"part of Net is a DataParallel: .*\(wrapped.module\)"),
        (_in_place_compiled, r"part of Net is compiled by torch.compile; .*HAP\(..., compile=True\)"),
        (_scripted, "of TorchScript, which cannot be traced; give the Python module"),
    ],
)
def test_modules_that_distribute_or_compile_themselves(part: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        traced(applied, X, part=part())


def _applied_to(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    ("wrap", "kind"),
    [
        (nn.parallel.DistributedDataParallel, "DistributedDataParallel"),
        (lambda m: fully_shard(m, mesh=init_device_mesh("cpu", (1,))), "FSDPLinear"),
        (
            lambda m: hetspmd.HAP(
                m, {"devices": [{"name": "lone", "flops": 1e6}]}, example=(X,), loss=_applied_to
            ),
            "HAP",
        ),
    ],
    ids=["DDP", "FSDP", "HAP"],
)
def test_wrappers_of_several_ranks_inside_are_refused(wrap: Callable[..., nn.Module], kind: str) -> None:
    inside = wrap(nn.Linear(4, 4))
    for part, name in ((inside, "part"), (nn.ModuleList([nn.Identity(), inside]), r"part\.1")):
        message = rf"^{name} of Net is a {kind}: .*give it the plain module .*HAP once, on the outside"
        with pytest.raises(TraceError, match=message):
            traced(applied, X, part=part)


def test_the_model_itself_is_named_so() -> None:
    with pytest.raises(TraceError, match=r"^the model is a SyncBatchNorm"):
        trace(nn.SyncBatchNorm(4), (X,), {})


@pytest.mark.parametrize("lazy", [nn.LazyLinear, nn.LazyBatchNorm1d])
def test_lazy_modules_are_told_to_run_once(lazy: type[nn.Module]) -> None:
    part = lazy(4) if lazy is nn.LazyLinear else lazy()
    with pytest.raises(
        ExampleError, match=r"part\.\w+ is a parameter of a lazy module .* call model\(batch\) once"
    ):
        traced(applied, X, part=part)
    part(X)
    traced(applied, X, part=part)


IDS = torch.arange(6)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, ids: m.e(ids).sum(),
        lambda m, ids: F.embedding(ids, m.e.weight, sparse=True).sum(),
        lambda m, ids: (m.e(ids) * torch.eye(6).to_sparse().to_dense()[:, :3]).sum(),
    ],
)
def test_sparse_gradients_are_refused(forward: Callable[..., torch.Tensor]) -> None:
    sparse = forward.__code__.co_consts.count(True) == 0
    with pytest.raises(TraceError, match=r"sparse=False"):
        traced(forward, IDS, e=nn.Embedding(8, 3, sparse=sparse))


def test_a_bag_with_sparse_gradients_is_refused() -> None:
    with pytest.raises(
        TraceError, match=r"e of Net is an EmbeddingBag with sparse gradients.*say sparse=False"
    ):
        traced(lambda m, ids: m.e(ids).sum(), IDS.view(2, 3), e=nn.EmbeddingBag(8, 3, sparse=True))


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (torch.eye(4).to_sparse(), r"hidden \(args\[1\]\) is a tensor of layout sparse_coo"),
        (
            torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged),
            r"hidden \(args\[1\]\) is a nested tensor",
        ),
        (np.zeros(3), r"hidden \(args\[1\]\) is a ndarray of numpy; .*torch.as_tensor"),
        (np.float32(1.0), r"hidden \(args\[1\]\) is a float32 of numpy"),
        ({"a": [object()]}, r"hidden\['a'\]\[0\] \(args\[1\]\['a'\]\[0\]\) is a object"),
    ],
)
def test_leaves_of_the_batch_are_named_by_the_arguments_name(leaf: object, message: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor, hidden: Any) -> torch.Tensor:
            return (x * self.w).sum()

    with pytest.raises(ExampleError, match=message):
        trace(Two(), (X, leaf), {})


def test_a_function_is_no_model() -> None:
    with pytest.raises(ExampleError, match=r"the model is a function, not an nn\.Module"):
        trace(lambda x: x.sum(), (X,), {})


def test_a_quantized_tensor_inside_is_refused() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        rough = torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)
        return (rough.dequantize() * m.w).sum()

    with pytest.raises(TraceError, match=r"quantized.*fake_quantize"):
        traced(forward, X, w=parameter(4))


def test_nets_of_dense_parts_are_admitted() -> None:
    model = Net(lambda m, ids: m.e(ids).sum(), e=nn.Embedding(8, 3))
    assert trace(model, (IDS,), {}).loss is not None

"""The named error for an exception during the trace: the model's own source line, and how to rewrite it."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType

import torch
from torch import nn

from hetspmd.errors import ExampleError, HetspmdError, TraceError
from hetspmd.trace.index_advice import index_advice

_UNTRACEABLE = (
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "GuardOnDataDependentSymNode",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "UserError",
)

_REWRITES: tuple[tuple[str, str], ...] = (
    (
        r"num_batches_tracked",
        "the factor of batch norm with momentum=None may stay a tensor: factor = 1.0 / self.num_batches_tracked, "
        "and self.running_mean.lerp_(mean, factor); torch's own forward, super().forward(x), works as it is",
    ),
    (r"^\s*assert\b", "remove the assertion from forward, or check the batch before the call"),
    (
        r"^\s*(if|elif|while)\b|\bif\b.*\belse\b",
        "compute both sides and choose: torch.where(condition, a, b)",
    ),
    (r"\brange\(", "loop a fixed number of times and mask what is too much: torch.where(i < n, new, old)"),
    (
        r"\.numpy\(\)|\.tolist\(\)|\bnp\.",
        "keep to torch's functions of tensors, or compute it before the call and pass it in the batch",
    ),
    (
        r"\.item\(\)|\b(float|int|bool)\(",
        "leave out .item(), float() and int(): a tensor without dimensions computes as a number does",
    ),
    (r"\blstsq\(", "use torch.linalg.pinv(a) @ b, whose shapes do not depend on the rank of a"),
    (r"quantize_per_", "use torch.fake_quantize_per_tensor_affine, which keeps floating-point numbers"),
    (r"\.nonzero\(|\bunique\b|\bmasked_select\b|\bargwhere\b", "use a mask or fixed sizes instead"),
    (
        r"[\w)]\[[^\]]*(<|>|==|!=|~|mask)[^\]]*\]",
        "keep the shape and multiply by the mask, or torch.where(mask, x, 0.0)",
    ),
)
"""What the failing line looks like, and its usual rewrite."""

_FUNCTIONS: tuple[tuple[str, str], ...] = (
    (
        r"\bpack_(padded_)?sequence\b",
        "run the recurrent layer over the padded batch and read what stands at the end of each sample, "
        "out[torch.arange(len(lengths)), lengths - 1], or mask the rest; what is behind the end does not matter "
        "there (but to a reversed direction)",
    ),
    (
        r"\bgaussian_nll_loss\b",
        "write it out: v = variance.clamp(min=1e-6); 0.5 * (v.log() + (mean - target).square() / v).mean()",
    ),
    (
        r"\b(cov|corrcoef)\(",
        "write the covariance of rows out: c = x - x.mean(1, keepdim=True); c @ c.T / (x.shape[1] - 1)",
    ),
)
"""Functions of torch that look into their tensors, by the failing line or by what it calls, and what to write."""

_GENERAL = (
    "Control flow or shapes that depend on the data must be rewritten with torch.where, masks or fixed sizes"
)


def named_error(error: Exception, model: nn.Module) -> HetspmdError:
    """The named error for an exception during the trace, with the model's own source line."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = _model_frame(frames)
    where = f" at {frame.filename}:{frame.lineno}: {frame.line}" if frame else ""
    kind = type(error).__name__
    text = str(error).strip().split("\n")[0].rstrip(".")
    numpy = ".numpy() is not supported" in text
    if _was_looked_at(frames):
        return TraceError(
            f"the trace cannot look at an object{where}: its class raises {kind}: {text}, where an object answers "
            "or raises AttributeError. Let it do so: object.__getattribute__(self, name) has both"
        )
    if kind in _UNTRACEABLE or "data-dependent" in text or "FakeTensor" in text or numpy:
        advice = _rewrite(frame.line or "" if frame else "", frames)
        if frame and "_local_scalar_dense" in text and not re.search(_OF_THEIR_OWN, frame.line or ""):
            index = index_advice(_code_of(frame, error), frame.lineno or 0)
            advice = f". Here: {index}" if index else advice
        return TraceError(
            f"{type(model).__name__} cannot be traced to one static graph{where}: {kind}: {text}. "
            f"{_GENERAL}{advice}"
        )
    if "only change requires_grad flags of leaf" in text:
        return TraceError(
            f"forward changes requires_grad of a parameter{where}: a plan is made for the parameters that require "
            "a gradient when the model is called. Freeze and thaw before the call (each state has a plan of its "
            "own), or keep the gradient away from them there: parameter.detach()"
        )
    return ExampleError(
        f"{type(model).__name__} fails on the example{where}: {kind}: {text}; try model(batch) on one device "
        "first. If it works there, the model takes another way while it is traced, as under torch.compile: look "
        "for checks of a tensor's class"
    )


_OF_THEIR_OWN = r"^\s*(assert|if|elif|while|for)\b|\brange\(|num_batches_tracked"
"""Lines whose rewrite is another one, even where a number in them is an index as well."""


def _code_of(frame: traceback.FrameSummary, error: Exception) -> CodeType | None:
    """The code that a frame of an error runs."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if (code.co_filename, trace.tb_lineno) == (frame.filename, frame.lineno):
            return code
        trace = trace.tb_next
    return None


def _rewrite(line: str, frames: traceback.StackSummary) -> str:
    files = [f.filename for f in frames]
    called = " ".join([line, *(f.name for f in frames if _is_torch(f.filename))])
    distributions = str(Path(torch.__file__).parent / "distributions")
    if any(name.startswith(distributions + os.sep) for name in files):
        return (
            ". Here a torch.distributions class looks into its arguments: make it with validate_args=False (for "
            "all of them: torch.distributions.Distribution.set_default_validate_args(False))"
        )
    if any(Path(name).name == "transformer.py" for name in files if _is_torch(name)):
        return ". Here nn.Transformer looks whether the mask is causal: say is_causal=True or is_causal=False"
    for pattern, advice in _FUNCTIONS:
        if re.search(pattern, called):
            return f". Here: {advice}"
    for pattern, advice in _REWRITES:
        if re.search(pattern, line):
            return f". Here: {advice}"
    return ""


def _model_frame(frames: traceback.StackSummary) -> traceback.FrameSummary | None:
    """The innermost frame that belongs to neither torch, hetspmd nor Python's own library."""
    own = _below(Path(__file__).parent.parent)
    library = _below(Path(sysconfig.get_path("stdlib")))
    for frame in reversed(frames):
        name = frame.filename
        of_python = library(name) and "site-packages" not in name and "dist-packages" not in name
        if not (_is_torch(name) or own(name) or of_python or name.startswith("<")):
            return frame
    return None


def _was_looked_at(frames: traceback.StackSummary) -> bool:
    """Whether a special method of the user's has raised the error when the trace looked what it reads."""
    looking, last = _below(Path(__file__).parent / "host"), _model_frame(frames)
    if last is None or not last.name.startswith("__"):
        return False
    before = frames.index(last) - 1
    return before >= 0 and looking(frames[before].filename)


def _is_torch(name: str) -> bool:
    return _below(Path(torch.__file__).parent)(name)


def _below(folder: Path) -> Callable[[str], bool]:
    """Whether a file lies in the folder; a package beside it whose name begins alike does not."""
    root = str(folder) + os.sep
    return lambda name: name.startswith(root)

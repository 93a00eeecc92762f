"""torchaudio's models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foreign.registry import Sample, model, without_dropout

BATCH = 8


def _audio(name: str, make: Callable[[Any], nn.Module], batch: Callable[[], Any], loss: Any) -> None:
    def built() -> Sample:
        import torchaudio

        return Sample(without_dropout(make(torchaudio.models)).train(), [batch(), batch()], loss)

    model(f"torchaudio-{name}", "torchaudio", built)


def _frames(network: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each frame, of logits (batch, time, classes) or the first item of a tuple."""
    out = network(x)
    logits = out[0] if isinstance(out, tuple) else out
    return F.cross_entropy(logits.flatten(0, 1), labels[:, : logits.shape[1]].flatten())


def _lengths(network: nn.Module, x: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(network(x, lengths)[0], target)


def _wave(network: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(network(x), target)


CONV_LAYERS = [(8, 8, 4), (8, 4, 4)]
_audio("wav2letter", lambda m: m.Wav2Letter(6, "mfcc", 8),
       lambda: (torch.randn(BATCH, 8, 40), torch.randint(0, 6, (BATCH, 21))),
       lambda n, x, y: F.nll_loss(n(x).transpose(1, 2).flatten(0, 1), y.flatten()))  # fmt: skip
_audio("deepspeech", lambda m: m.DeepSpeech(8, 16, 6), lambda: (
    torch.randn(BATCH, 1, 10, 8), torch.randint(0, 6, (BATCH, 10))), _frames)  # fmt: skip
_audio("conformer", lambda m: m.Conformer(8, 2, 16, 1, 3), lambda: (
    torch.randn(BATCH, 10, 8), torch.full((BATCH,), 10), torch.randn(BATCH, 10, 8)), _lengths)  # fmt: skip
_audio("emformer", lambda m: m.Emformer(8, 2, 16, 1, 4, right_context_length=2), lambda: (
    torch.randn(BATCH, 10, 8), torch.full((BATCH,), 10), torch.randn(BATCH, 8, 8)), _lengths)  # fmt: skip
_audio("conv-tasnet", lambda m: m.ConvTasNet(2, 8, 8, 3, 8, 8, 2, 1), lambda: (
    torch.randn(BATCH, 1, 64), torch.randn(BATCH, 2, 64)), _wave)  # fmt: skip
_audio("demucs", lambda m: m.HDemucs(["a"], 1, channels=4, nfft=64, depth=2), lambda: (
    torch.randn(BATCH, 1, 256), torch.randn(BATCH, 1, 1, 256)), _wave)  # fmt: skip
_audio("wavernn", lambda m: m.WaveRNN([2, 2], 8, 4, 1, 8, 8, 5, 8, 8, 8), lambda: (
    torch.randn(BATCH, 1, 16), torch.randn(BATCH, 1, 8, 8), torch.randn(BATCH, 1, 16, 8)),
    lambda n, w, s, y: F.mse_loss(n(w, s), y))  # fmt: skip
_audio("wav2vec2", lambda m: m.wav2vec2_model(
    "layer_norm", CONV_LAYERS, True, 16, 0.0, 4, 2, 1, 2, 0.0, 24, 0.0, 0.0, False, 0.0, 6),
    lambda: (torch.randn(BATCH, 160), torch.randint(0, 6, (BATCH, 9))), _frames)  # fmt: skip
_audio("squim", lambda m: m.squim_objective_model(8, 4, 8, 2, 8, 1, "LSTM", 8), lambda: (
    torch.randn(BATCH, 64), torch.randn(BATCH)), lambda n, x,
    y: (torch.stack(n(x)).sum(0) - y).square().mean())  # fmt: skip


def _transformed(name: str, make: Callable[[Any], nn.Module]) -> None:
    """A transform of torchaudio before a linear layer."""

    def built() -> Sample:
        import torchaudio

        network = nn.Sequential(make(torchaudio.transforms), nn.Flatten(), nn.LazyLinear(5))
        network(torch.randn(2, 256))
        batches = [(torch.randn(BATCH, 256), torch.randint(0, 5, (BATCH,))) for _ in range(2)]
        return Sample(network, batches, lambda n, x, y: F.cross_entropy(n(x), y))

    model(f"torchaudio-{name}", "torchaudio", built)


_transformed("mel-spectrogram", lambda t: t.MelSpectrogram(16000, 64, n_mels=8))
_transformed("mfcc", lambda t: t.MFCC(16000, 6, melkwargs={"n_fft": 64, "n_mels": 8}))

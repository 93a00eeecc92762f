"""torchvision: classification, segmentation, detection and video."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foreign.registry import Sample, model, without_dropout
from foreign.timm_models import CLASSES, classify, images


def _classifier(name: str, size: int, make: Callable[[Any], nn.Module], loss: Any = classify) -> None:
    def built() -> Sample:
        import torchvision

        return Sample(without_dropout(make(torchvision.models)).train(), [images(size), images(size)], loss)

    model(f"torchvision-{name}", "torchvision", built)


def _with_auxiliary(network: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """The sum over the outputs of the heads of GoogLeNet and Inception."""
    outputs = network(x)
    heads = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.stack([F.cross_entropy(o, labels) for o in heads if o is not None]).sum()


def _squeezed(m: Any) -> nn.Module:
    network: nn.Module = m.squeezenet1_1(num_classes=CLASSES)
    return network


def _mobile(m: Any) -> nn.Module:
    from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

    block = (8, 3, 16, 12, True, "HS", 2, 1, 1.0)
    return MobileNetV3([InvertedResidualConfig(*block)], 16, num_classes=CLASSES)


def _efficient(m: Any) -> nn.Module:
    from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig

    blocks = [FusedMBConvConfig(2, 3, 2, 8, 8, 1), MBConvConfig(2, 3, 2, 8, 12, 1)]
    return EfficientNet(blocks, 0.0, num_classes=CLASSES, last_channel=16)


def _convnext(m: Any) -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 12, 1), CNBlockConfig(12, None, 1)], num_classes=CLASSES)


def _regnet(m: Any) -> nn.Module:
    from torchvision.models.regnet import BlockParams, RegNet

    return RegNet(BlockParams([1, 1], [8, 16], [8, 8], [1.0, 1.0], [2, 2], 0.25), CLASSES, stem_width=8)


def _alexnet(m: Any) -> nn.Module:
    """Its head narrower than it comes: 54 of its 57 million weights are there."""
    network: nn.Module = m.AlexNet(CLASSES)
    head: Any = network.classifier
    head[1], head[4], head[6] = nn.Linear(256 * 36, 24), nn.Linear(24, 24), nn.Linear(24, CLASSES)
    return network


def _resnet(**options: Any) -> Callable[[Any], nn.Module]:
    return lambda m: m.resnet.ResNet(
        m.resnet.Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, width_per_group=8, **options
    )


_classifier("alexnet", 64, _alexnet)
_classifier("resnet", 64, _resnet())
_classifier("resnext", 64, _resnet(groups=4))
_classifier("squeezenet", 32, _squeezed)
_classifier("densenet", 32, lambda m: m.DenseNet(4, (2, 2), 8, num_classes=CLASSES))
_classifier("densenet-checkpointed", 32,
            lambda m: m.DenseNet(4, (2, 2), 8, num_classes=CLASSES, memory_efficient=True))  # fmt: skip
_classifier("googlenet", 32, lambda m: m.GoogLeNet(CLASSES, aux_logits=False, init_weights=False))
_classifier("mobilenet-v2", 32, lambda m: m.MobileNetV2(
    CLASSES, 0.25, [[1, 8, 1, 1], [3, 12, 1, 2]]))  # fmt: skip
_classifier("mobilenet-v3", 32, _mobile)
_classifier("mnasnet", 32, lambda m: m.MNASNet(0.1, CLASSES, dropout=0.0))
_classifier("shufflenet", 32, lambda m: m.ShuffleNetV2([1, 1, 1], [8, 16, 24, 32, 48], CLASSES))
_classifier("efficientnet", 32, _efficient)
_classifier("convnext", 32, _convnext)
_classifier("regnet", 32, _regnet)
_classifier("vit", 16, lambda m: m.VisionTransformer(16, 8, 1, 3, 24, 40, num_classes=CLASSES))
_classifier(
    "swin",
    32,
    lambda m: m.SwinTransformer(
        [4, 4], 12, [2, 1], [2, 2], [4, 4], stochastic_depth_prob=0.0, num_classes=CLASSES
    ),
)
_classifier(
    "maxvit",
    32,
    lambda m: m.MaxVit((32, 32), 8, 4, 8, [8, 16], [1, 1], stochastic_depth_prob=0.0, num_classes=CLASSES),
)


def _video() -> Sample:
    from torchvision.models.video.resnet import BasicBlock, BasicStem, Conv3DSimple, VideoResNet

    network = VideoResNet(BasicBlock, [Conv3DSimple] * 4, [1, 1, 1, 1], BasicStem, CLASSES)
    return Sample(network, [(torch.randn(8, 3, 4, 16, 16), torch.randint(0, CLASSES, (8,)))] * 2, classify)


def _masks(network: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(network(x)["out"], labels)


def _segments(name: str, head: Callable[[Any], nn.Module]) -> None:
    def built() -> Sample:
        import torchvision
        from torchvision.models._utils import IntermediateLayerGetter

        segmentation = torchvision.models.segmentation
        body = torchvision.models.resnet.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1])
        backbone = IntermediateLayerGetter(body, {"layer1": "out"})
        kind = {"fcn": segmentation.FCN, "deeplab": segmentation.DeepLabV3}[name]
        network = without_dropout(kind(backbone, head(segmentation))).train()
        batches = [(torch.randn(8, 3, 32, 32), torch.randint(0, CLASSES, (8, 32, 32))) for _ in range(2)]
        return Sample(network, batches, _masks)

    model(f"torchvision-{name}", "torchvision", built)


def _detected(network: nn.Module, x: Any, targets: Any) -> Tensor:
    """The sum of a detector's losses; in evaluation, of its scores."""
    out = network(x, targets)
    found = [o["scores"].sum() for o in out] if isinstance(out, list) else list(out.values())
    return torch.stack(found).sum()


def _detector(name: str) -> None:
    def built() -> Sample:
        from torchvision.models import detection

        options = {"weights": None, "weights_backbone": None, "num_classes": 3}
        if "ssd" not in name:
            options |= {"min_size": 32, "max_size": 32}
        network = getattr(detection, name)(**options).train()
        targets = []
        for _ in range(2):
            corner = torch.rand(1, 2) * 10
            targets.append({"boxes": torch.cat([corner, corner + 15], 1), "labels": torch.tensor([1])})
        batch = ([torch.rand(3, 32, 32), torch.rand(3, 32, 32)], targets)
        return Sample(network, [batch], _detected)

    model(f"torchvision-{name}", "torchvision", built)


model("torchvision-video-r3d", "torchvision", _video)
_segments("fcn", lambda s: s.fcn.FCNHead(64, CLASSES))
_segments("deeplab", lambda s: s.deeplabv3.DeepLabHead(64, CLASSES, (2, 4)))
for detector in (
    "fasterrcnn_mobilenet_v3_large_320_fpn", "ssdlite320_mobilenet_v3_large", "retinanet_resnet50_fpn",
    "fcos_resnet50_fpn",
):  # fmt: skip
    _detector(detector)

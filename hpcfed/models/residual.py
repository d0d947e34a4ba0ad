"""torchvision's ResNets, stacked. Batch norms also do the residual sums and activations
that follow them, which takes fewer passes over memory.
"""

import sys

from torch import Tensor, nn

from hpcfed.models.stacked_layers import StackedBatchNorm2d

_SOURCE = "torchvision.models.resnet"


class ResidualBlock(nn.Module):
    """Two convolutions with a skip connection; replaces torchvision's BasicBlock.

    It has the block's layers under their names.
    """

    conv1: nn.Module
    bn1: StackedBatchNorm2d
    conv2: nn.Module
    bn2: StackedBatchNorm2d
    downsample: nn.Module

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        for name, layer in block.named_children():
            self.add_module(name, layer)
        # The block's single ReLU is applied after both norms.
        for norm in (self.bn1, self.bn2):
            norm.slope = 0.0
        self.has_downsample = "downsample" in self._modules

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x))
        residual = self.downsample(x) if self.has_downsample else x
        z: Tensor = self.bn2(self.conv2(y), residual)
        return z


def fused(module: nn.Module) -> nn.Module:
    """Return a module of torchvision's ResNets with fused layers, any other unchanged.

    Its layers must already be stacked.
    """
    # A torchvision network has already imported it; others do not need it.
    resnet = sys.modules.get(_SOURCE)
    if resnet is None:
        return module
    if type(module) is resnet.BasicBlock and _has_norms(module, "bn1", "bn2"):
        return ResidualBlock(module)
    if type(module) is resnet.ResNet and _has_norms(module, "bn1"):
        # The stem is the only user of this ReLU: blocks have their own.
        norm = module.bn1
        assert isinstance(norm, StackedBatchNorm2d)
        norm.slope = 0.0
        module.relu = nn.Identity()
    return module


def _has_norms(module: nn.Module, *names: str) -> bool:
    """Whether norms are stacked ones, and what follows them is a ReLU."""
    layers = module._modules
    norms = [layers.get(name) for name in names]
    stacked = all(type(norm) is StackedBatchNorm2d for norm in norms)
    return stacked and type(layers.get("relu")) is nn.ReLU

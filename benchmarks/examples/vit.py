"""A vision transformer, as one would write it for one model.

Class token and positions are bare parameters; attention is torch's.

  hpcfed run --model benchmarks/examples/vit.py:ViT --dataset cifar10 --data-root /data
  hpcfed run --model benchmarks/examples/vit.py:ViT --model-options '{"depth": 4}' ...
"""

import torch
from torch import Tensor, nn
from transformer import Block


class ViT(nn.Module):
    def __init__(
        self,
        shape: tuple[int, int, int] = (3, 32, 32),
        classes: int = 10,
        *,
        patch: int = 4,
        width: int = 128,
        depth: int = 6,
        heads: int = 4,
    ) -> None:
        """`shape` and `classes` come from the data set, the others from
        --model-options.
        """
        super().__init__()
        channels, height, rows = shape
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        count = (height // patch) * (rows // patch)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, count + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        token = self.token.expand(len(images), -1, -1)
        x = torch.cat([token, patches], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])

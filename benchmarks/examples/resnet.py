"""ResNet-20 with group norm in place of batch norm, which uneven clients disturb.

hpcfed run --model benchmarks/examples/resnet.py:ResNet --dataset cifar100 --data-root /data
"""

from torch import Tensor, nn


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        y = self.norm2(self.conv2(y))
        return (y + self.shortcut(x)).relu()


class ResNet(nn.Module):
    def __init__(
        self,
        shape: tuple[int, int, int] = (3, 32, 32),
        classes: int = 100,
        *,
        width: int = 16,
        blocks: int = 3,
        groups: int = 4,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(shape[0], width, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(groups, width)
        layers = []
        inputs = width
        for stage in range(3):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                outputs = width << stage
                layers.append(Residual(inputs, outputs, stride, groups))
                inputs = outputs
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        return self.head(self.blocks(x).mean((2, 3)))

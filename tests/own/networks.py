"""Networks as users write them, one for every way of being called."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GroupNormCNN(nn.Module):
    def __init__(self, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(shape[0], 8, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, 8)
        self.conv2 = nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm1(self.conv1(x)))
        x = F.gelu(self.norm2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


class Tutorial(nn.Module):
    """What most have learned: activations in place, and images made vectors by view."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8 * 4 * 4, 10)
        self.shortcut = nn.Linear(3 * 8 * 8, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.conv1(x))
        y = self.conv2(y)
        y += 1
        return self.head(y.view(len(y), -1)) + self.shortcut(x.view(len(x), -1))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Bare parameters for the class token and the positions: vmap's."""

    def __init__(
        self,
        shape: tuple[int, ...] = (1, 8, 8),
        classes: int = 10,
        *,
        patch: int = 4,
        width: int = 16,
        depth: int = 2,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(shape[0], width, patch, stride=patch)
        count = (shape[1] // patch) * (shape[2] // patch)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, count + 1, width))
        self.blocks = nn.Sequential(*(Block(width, 2) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class GPT(nn.Module):
    """Positions by an embedding of no batch, and a head tied to the embedding."""

    def __init__(
        self, classes: int = 11, *, length: int = 6, width: int = 16, depth: int = 1
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(classes, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(
            *(Block(width, 2, causal=True) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", torch.full((3,), -torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        x = self.tokens(x) + self.positions(places)
        return self.head(self.norm(self.blocks(x)))


class GRU(nn.Module):
    def __init__(
        self,
        classes: int = 11,
        *,
        width: int = 12,
        layers: int = 1,
        kind: str = "GRU",
        bidirectional: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(classes, width)
        self.rnn = getattr(nn, kind)(
            width, width, layers, batch_first=True, bidirectional=bidirectional
        )
        self.head = nn.Linear(width * (2 if bidirectional else 1), classes)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(self.tokens(x))
        return self.head(y)


class TimeFirstGRU(nn.Module):
    """Takes the last state of a recurrent layer that wants the time first."""

    def __init__(self, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> None:
        super().__init__()
        self.rnn = nn.GRU(shape[2], 12)
        self.head = nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        _, last = self.rnn(x[:, 0].transpose(0, 1))
        return self.head(last[-1])


class TorchTransformer(nn.Module):
    """torch's own encoder, with tensors that no known layer has."""

    def __init__(self, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(
            shape[2], 2, 16, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(shape[2], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x[:, 0]).mean(1))


class Branching(nn.Module):
    """Looks at its numbers to decide what it does: one client after another."""

    def __init__(self, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> None:
        super().__init__()
        self.a = nn.Linear(shape[1] * shape[2], 16)
        self.b = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x.flatten(1))
        if float(self.a.weight.detach().sum()) > 0:
            y = y.tanh()
        return self.b(y)


class Centred(nn.Module):
    """Mixes the samples of a batch, which padding would spoil."""

    def __init__(self, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> None:
        super().__init__()
        self.a = nn.Linear(shape[1] * shape[2], classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x.flatten(1))
        return y - y.mean(0)


class Noisy(nn.Module):
    """Draws torch's own random numbers in training."""

    def __init__(self, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> None:
        super().__init__()
        self.a = nn.Linear(shape[1] * shape[2], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.training:
            x = x + 0.1 * torch.randn_like(x)
        return self.a(F.dropout(x, 0.1, self.training))


class Frozen(nn.Module):
    """A frozen layer below a trained one, and a bias that alone is trained."""

    def __init__(self, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> None:
        super().__init__()
        self.a = nn.Linear(shape[1] * shape[2], 16).requires_grad_(False)
        self.b = nn.Linear(16, 16)
        self.b.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(16), requires_grad=False)
        self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x.flatten(1)).relu()) * self.scale)


class Mixer(nn.Module):
    def __init__(self, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> None:
        super().__init__()
        self.rows = nn.Linear(shape[1], shape[1])
        self.norm = nn.RMSNorm(shape[2])
        self.columns = nn.Linear(shape[2], shape[2])
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(shape[2], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, 0]
        x = x + self.rows(self.norm(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.drop(self.columns(x).relu())
        return self.head(x.mean(1))


class Conv1dBatchNorm(nn.Module):
    """Rows of an image as channels of a sequence."""

    def __init__(self, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv1d(shape[1], 6, 3, padding=1, groups=2)
        self.norm1 = nn.BatchNorm1d(6)
        self.hidden = nn.Linear(6, 8)
        self.norm2 = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv(x[:, 0])).relu().mean(2)
        return self.head(self.norm2(self.hidden(x)).relu())


A_NUMBER = 3


def not_a_module() -> str:
    return "a network"


def nothing_to_train() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).requires_grad_(False)

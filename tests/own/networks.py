"""Networks as users write them, one for every way of being called."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
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


class FixedNorm(nn.Module):
    """Its batch norm keeps the statistics that it began with; `kinds`: found by type."""

    def __init__(self, *, kinds: bool = False) -> None:
        super().__init__()
        self.kinds = kinds
        self.a = nn.Linear(64, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 10)

    def train(self, mode: bool = True) -> "FixedNorm":
        super().train(mode)
        if not self.kinds:
            self.norm.eval()
        for module in self.modules():
            if self.kinds and isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.a(x.flatten(1))).relu())


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


class Pixels(nn.Module):
    """One layer, for networks that remember something beside it."""

    def __init__(self, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> None:
        super().__init__()
        self.a = nn.Linear(shape[1] * shape[2], classes)

    def logits(self, x: Tensor) -> Tensor:
        return self.a(x.flatten(1))


class Counting(Pixels):
    """Counts its batches in an integer that its outputs depend on."""

    def __init__(self, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> None:
        super().__init__(shape, classes)
        self.register_buffer("k", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.k += 1
        return self.logits(x) / (1 + 0.2 * self.k)


class Drawn(Pixels):
    """Has a constant that its seed draws, and one that is the same for all."""

    def __init__(
        self,
        shape: tuple[int, ...] = (1, 8, 8),
        classes: int = 10,
        *,
        kind: str = "",
    ) -> None:
        super().__init__(shape, classes)
        self.register_buffer("mask", torch.tensor([1.0, torch.nan]), persistent=False)
        self.register_buffer("known", torch.ones(10, dtype=torch.bool))
        drawn = torch.rand(10) if kind else torch.ones(10)
        if kind == "attribute":
            self.table = drawn
        else:
            self.register_buffer("table", drawn, persistent=kind == "persistent")

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x) * self.table * self.known


class Foreign(Pixels):
    """Draws its weights by numpy and Python."""

    def __init__(self, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> None:
        super().__init__(shape, classes)
        drawn = np.random.randn(*self.a.weight.shape)  # noqa: NPY002
        with torch.no_grad():
            self.a.weight.copy_(torch.from_numpy(drawn) * random.random())

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)


class Unseeded(Pixels):
    """Draws its weights from generators that no seed of a run reaches."""

    def __init__(
        self,
        shape: tuple[int, ...] = (1, 8, 8),
        classes: int = 10,
        *,
        draws: str = "fresh",
    ) -> None:
        super().__init__(shape, classes)
        generator = np.random.default_rng() if draws == "fresh" else NOISE
        drawn = generator.normal(size=tuple(self.a.weight.shape))
        with torch.no_grad():
            self.a.weight.copy_(torch.from_numpy(drawn))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)


class Warming(Counting):
    """Decides by its count what it does: one client after another."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.tanh() if int(self.k) < 3 else y


class Remembering(Pixels):
    """Buffers of all kinds that it assigns anew, one of them in no state_dict."""

    def __init__(self, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> None:
        super().__init__(shape, classes)
        self.register_buffer("mean", torch.tensor(0.5))
        self.register_buffer("odd", torch.zeros(2, dtype=torch.bool), persistent=False)
        self.register_buffer("steps", torch.ones(3, dtype=torch.uint8))
        self.register_buffer("table", torch.arange(10.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.logits(x)
        if self.training:
            self.mean = 0.8 * self.mean + 0.2 * self.a.weight.detach().mean()
            self.odd = ~self.odd
            self.steps = self.steps + torch.arange(
                3, dtype=torch.uint8, device=x.device
            )
        return y - self.mean + self.odd.sum() + 0.1 * self.steps.sum() * self.table


class Cumulative(nn.Module):
    """A batch norm whose statistics are means over all batches that it has counted."""

    def __init__(self, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape[0], 4, 3)
        self.norm = nn.BatchNorm2d(4, momentum=None)
        self.head = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


class Momentary(nn.Module):
    """A batch norm without running statistics: evaluation, too, takes the batch's own."""

    def __init__(self, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> None:
        super().__init__()
        self.a = nn.Linear(shape[1] * shape[2], 12)
        self.norm = nn.BatchNorm1d(12, track_running_stats=False)
        self.head = nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.a(x.flatten(1))).relu())


class Temperature(Pixels):
    """Single numbers: a parameter, and a buffer that follows it in place."""

    def __init__(self, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> None:
        super().__init__(shape, classes)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("level", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale * self.logits(x)
        if self.training:
            self.level.mul_(0.9).add_(0.1 * self.scale.detach())
        return y / self.level


class Following(nn.Module):
    """Changes buffers in place behind layers whose backward pass needs other buffers."""

    def __init__(self, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> None:
        super().__init__()
        self.a = nn.Linear(shape[1] * shape[2], 12)
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, classes)
        self.register_buffer("factor", torch.tensor(0.9))
        self.register_buffer("level", torch.tensor(1.0))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.factor.mul_(0.99)
        y = self.factor * self.norm(self.a(x.flatten(1)))
        if self.training:
            self.level.mul_(0.9).add_(0.1 * self.norm.weight.detach().mean())
            self.seen += 1
        return self.head(y.relu()) / (1 + self.level.abs() + 0.1 * self.seen)


NOISE = np.random.default_rng(4)


def noise() -> float:
    return float(NOISE.random())


def _drawing() -> Callable[..., float]:
    chance = random.Random(3)
    return lambda self, y: 0 * chance.random()


class Attribute(Pixels):
    """Remembers something outside of buffers, in one of several ways."""

    def __init__(
        self,
        shape: tuple[int, ...] = (1, 8, 8),
        classes: int = 10,
        *,
        kind: str = "number",
    ) -> None:
        super().__init__(shape, classes)
        self.kind = kind
        self.inner = nn.Identity()
        self.inner.count = 0
        self.before: Tensor | None = None
        self.average = torch.zeros(10)
        self.history: list[float] = []
        self.table = {"shape": shape, "calls": 0}
        self.generator = torch.Generator().manual_seed(1)
        self.register_buffer("longer", torch.zeros(0))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.teacher = nn.Parameter(torch.ones(10), requires_grad=False)
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.logits(x))
        return y if not self.training else y + getattr(self, f"_{self.kind}")(y)

    def _number(self, y: Tensor) -> float:
        self.inner.count += 1
        return 0.0

    def _tensor(self, y: Tensor) -> Tensor:
        self.average = 0.9 * self.average + y.detach().mean(0)
        return self.average

    def _last(self, y: Tensor) -> Tensor:
        before = y if self.before is None else self.before
        self.before = y.detach()
        return y - before

    def _list(self, y: Tensor) -> float:
        self.history.append(1.0)
        return 0.0

    def _dict(self, y: Tensor) -> float:
        self.table["calls"] += 1
        return 0.0

    def _own_draws(self, y: Tensor) -> Tensor:
        return torch.rand(10, generator=self.generator)

    def _of_file(self, y: Tensor) -> float:
        return 0 * noise()

    _around = _drawing()

    def _shape(self, y: Tensor) -> float:
        self.longer = torch.cat([self.longer, torch.ones(1)])
        return 0.0

    def _complex(self, y: Tensor) -> float:
        self.phase += 1j
        return 0.0

    def _teacher(self, y: Tensor) -> float:
        self.teacher.mul_(0.9)
        return 0.0

    def _norms(self, y: Tensor) -> Tensor:
        return 1 / self.norm.num_batches_tracked

    def _python(self, y: Tensor) -> float:
        return random.random()

    def _numpy(self, y: Tensor) -> float:
        return float(np.random.rand())  # noqa: NPY002

    def _hidden(self, y: Tensor) -> float:
        CALLS.append(1)
        return float(len(CALLS))

    def _rounding(self, y: Tensor) -> float:
        """Give every second call an output that is off by a rounding."""
        CALLS.append(1)
        return 1e-7 * (len(CALLS) % 2)


CALLS: list[int] = []


class Caching(Pixels):
    """Keeps what it has computed, which changes nothing: no memory of any client."""

    def __init__(self, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> None:
        super().__init__(shape, classes)
        self.register_buffer("mask", None)
        self.ramp: Tensor | None = None
        self.features: Tensor | None = None
        self.shapes: dict[int, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(10, device=x.device, dtype=x.dtype)
        if self.ramp is None:
            self.ramp = torch.arange(10, device=x.device)
        self.shapes[x.shape[1]] = x.shape[2]
        y = self.logits(x)
        self.features = y.detach()
        return y * self.mask + self.ramp


class Belated(Counting):
    """A buffer that only the third step changes, in place or anew."""

    def __init__(
        self,
        shape: tuple[int, ...] = (1, 8, 8),
        classes: int = 10,
        *,
        in_place: bool = True,
        told: bool = False,
    ) -> None:
        super().__init__(shape, classes)
        self.in_place, self.told = in_place, told
        self.register_buffer("late", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.told and self.training:
            self.late.add_(0)
        if self.training and int(self.k) == 3:
            if self.in_place:
                self.late += 1
            else:
                self.late = self.late + 1
        return y + self.late


class Lazy(nn.Module):
    """Layers that learn their sizes from the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.LazyConv2d(4, 3)
        self.norm = nn.LazyBatchNorm2d()
        self.head = nn.LazyLinear(10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().flatten(1))


A_NUMBER = 3


def compiled() -> Any:
    return torch.compile(Attribute())


def parallel() -> nn.Module:
    return nn.DataParallel(Attribute())


def not_a_module() -> str:
    return "a network"


def nothing_to_train() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).requires_grad_(False)


class Reading(nn.Module):
    """Multiplies by its layer's weight itself, and asks for its bias and sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 12)
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        pixels = x.view(len(x), self.first.in_features)
        return self.head(torch.tanh(pixels @ self.first.weight.T + self.first.bias))


class Dependent(nn.Module):
    """Does with a batch what depends on it, in evaluation or for a single sample."""

    def __init__(self, *, when: str) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(x.flatten(1))
        if self.when == "evaluation" and not self.training:
            return y - y.mean(0)
        if self.when == "single" and len(x) == 1:
            return 2 * y
        return y


class Skipping(nn.Module):
    """Skips a layer once in a thousand times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if torch.rand(()) > 0.001:
            x = self.first(x)
        return self.head(x)


class Attending(nn.Module):
    """Drops by functions: within attention, and of what comes out."""

    def __init__(self, *, always: bool = False) -> None:
        super().__init__()
        self.into = nn.Linear(8, 24)
        self.head = nn.Linear(64, 10)
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.into(x).unflatten(-1, (3, 8)).unbind(-2)
        p = 0.3 if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=p)
        y = F.dropout(y, 0.4, self.training or self.always)
        return self.head(y.flatten(1))

"""LoRA by hand in plain torch, as a careful user writes it: one client after the other,
or one adapter for everyone's samples.

The base is frozen, in the precision of its configuration. Adapters are float32 and
multiply in the base's precision; AdamW is torch's fused one. Moments start from zero
when a client's turn begins, as in hpcfed.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RATE, DECAY = 1e-3, 0.0
"""AdamW's learning rate and decay, the same as in hpcfed's command."""


class Adapted(nn.Module):
    """A frozen linear layer, and beside it the product of two thin matrices."""

    def __init__(self, base: Any, *, rank: int) -> None:
        super().__init__()
        self.base = base
        outputs, inputs = base.weight.shape
        if not isinstance(base, nn.Linear):  # GPT-2's Conv1D: its weight is transposed
            inputs, outputs = outputs, inputs
        dtype = torch.promote_types(base.weight.dtype, torch.float32)
        about = {"dtype": dtype, "device": base.weight.device}
        self.down = nn.Parameter(torch.empty(rank, inputs, **about))
        self.up = nn.Parameter(torch.zeros(outputs, rank, **about))
        nn.init.kaiming_uniform_(self.down, a=sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        thin = F.linear(x, self.down.to(x.dtype))
        y: Tensor = self.base(x) + F.linear(thin, self.up.to(x.dtype))
        return y


def build(config: Mapping[str, Any], device: torch.device) -> nn.Module:
    """Return a causal language model with random weights, made on the device."""
    import transformers

    values = dict(config)
    made = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    made.use_cache = False
    with device:
        network: nn.Module = transformers.AutoModelForCausalLM.from_config(made)
    return network


def adapt(network: nn.Module, *, rank: int, layers: str) -> list[nn.Parameter]:
    """Freeze a network, and add adapters to linear layers of these names."""
    network.requires_grad_(False)
    for name, module in list(network.named_modules()):
        linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if not linear or not any(fnmatchcase(name, p) for p in layers.split(",")):
            continue
        parent, _, own = name.rpartition(".")
        setattr(network.get_submodule(parent), own, Adapted(module, rank=rank))
    return [p for p in network.parameters() if p.requires_grad]


def of_hidden(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of the next tokens."""
    logits = head(hidden)
    # In float32 at least: a sum of 50,000 exponentials needs it.
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten())


class Plain:
    """A network with one set of adapters, and how it is trained."""

    def __init__(self, network: nn.Module, *, rank: int, layers: str) -> None:
        self.network = network.train()
        self.trained = adapt(network, rank=rank, layers=layers)
        self._of_hidden = of_hidden
        self._loss = self._eager_loss

    @property
    def precision(self) -> str:
        """The base's precision, in which adapters multiply, too."""
        frozen = self.network.get_input_embeddings().weight.dtype  # type: ignore[operator]
        return "bf16" if frozen == torch.bfloat16 else str(frozen).partition(".")[2]

    def compile(self, whole: bool) -> None:
        """Let torch compile what comes: as a whole, or block by block, which takes
        seconds instead of a minute since all blocks are alike.
        """
        # Without dynamic shapes, which a second size of batches would switch on.
        if whole:
            self._loss = torch.compile(self._eager_loss, dynamic=False)
            return
        lists = [m for m in self.network.modules() if isinstance(m, nn.ModuleList)]
        for block in max(lists, key=len):
            block.compile(dynamic=False)
        self._of_hidden = torch.compile(of_hidden, dynamic=False)

    def _eager_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        network: Any = self.network
        hidden = network.base_model(inputs, use_cache=False).last_hidden_state
        return self._of_hidden(network.lm_head, hidden, targets)

    def optimiser(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.trained, RATE, weight_decay=DECAY, fused=True)

    def step(
        self, optimiser: torch.optim.Optimizer, tokens: Tensor, *, at_once: int
    ) -> Tensor:
        """Take a step on texts [samples, length + 1], some at once; return the loss."""
        optimiser.zero_grad(set_to_none=True)
        total = tokens.new_zeros((), dtype=torch.float64)
        for part in tokens.split(at_once):
            inputs, targets = part[:, :-1].contiguous(), part[:, 1:].contiguous()
            loss = self._loss(inputs, targets) * (len(part) / len(tokens))
            loss.backward()
            total += loss.detach()
        optimiser.step()
        return total

    def row(self) -> Tensor:
        """Return all adapters, flattened."""
        return nn.utils.parameters_to_vector(self.trained).detach()

    def loop(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Train one client after the other, each on its own row of adapters, which is
        replaced; tokens are [clients, steps, batch, length + 1]. Return the losses.
        """
        losses = []
        for row, own in zip(rows, tokens, strict=False):
            with torch.no_grad():
                sizes = [p.numel() for p in self.trained]
                for p, values in zip(self.trained, row.split(sizes), strict=True):
                    p.copy_(values.view_as(p))
            optimiser = self.optimiser()
            for batch in own:
                losses.append(self.step(optimiser, batch, at_once=len(batch)))
            row.copy_(self.row())
        return torch.stack(losses)

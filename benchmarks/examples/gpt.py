"""A small GPT that predicts the next character.

hpcfed run --model benchmarks/examples/gpt.py:GPT --dataset text:DIR
hpcfed run --model benchmarks/examples/gpt.py:GPT --dataset text:DIR --lora 8 --init FILE
"""

import torch
from torch import Tensor, nn
from transformer import Block


class GPT(nn.Module):
    def __init__(
        self,
        shape: tuple[int] = (128,),
        classes: int = 100,
        *,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
    ) -> None:
        """`shape` is the length of a text, `classes` the size of the vocabulary."""
        super().__init__()
        (length,) = shape
        self.tokens = nn.Embedding(classes, width)
        self.positions = nn.Embedding(length, width)
        blocks = [Block(width, heads, causal=True) for _ in range(depth)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=False)
        # One table for both ends, as GPT-2 has it.
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        return self.head(self.norm(self.blocks(x)))

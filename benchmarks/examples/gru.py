"""A recurrent network that predicts the next character.

hpcfed run --model benchmarks/examples/gru.py:GRU --dataset text:DIR
"""

from torch import Tensor, nn


class GRU(nn.Module):
    def __init__(self, classes: int = 100, *, width: int = 256) -> None:
        """`classes` is the size of the vocabulary."""
        super().__init__()
        self.tokens = nn.Embedding(classes, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.rnn(self.tokens(tokens))
        return self.head(states)

"""How a row is cut into tokens: tensor by tensor, in pieces of equal length."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class TokenLayout:
    """Where each column of a row stands among its tokens.

    A token has numbers of one tensor only; the last one of each tensor is filled up
    with zeros. Tokens without any column fill up the last window.
    """

    length: int
    """Numbers of a token."""
    window: int
    """Tokens that attend to each other."""
    tensors: Tensor
    """[tokens]: the number of each token's tensor; one more than the last for tokens
    without columns.
    """
    places: Tensor
    """[tokens]: the number of each token within its tensor."""
    at: Tensor
    """[tokens × length]: the column of each number; −1 where there is none."""
    begins: Tensor
    """[tokens + 1]: how many columns stand before each token; on the host."""
    num_tensors: int

    @classmethod
    def of(
        cls, widths: Sequence[int], *, length: int, window: int, device: torch.device
    ) -> "TokenLayout":
        """Cut rows whose tensors have these widths."""
        tensors, places, at = [], [], []
        begin = 0
        for number, width in enumerate(widths):
            tokens = -(-width // length)
            tensors.append(torch.full((tokens,), number))
            places.append(torch.arange(tokens))
            columns = torch.full((tokens * length,), -1)
            columns[:width] = torch.arange(begin, begin + width)
            at.append(columns)
            begin += width
        total = sum(map(len, places))
        window = min(window, total)
        missing = -total % window
        tensors.append(torch.full((missing,), len(widths)))
        places.append(torch.arange(missing))
        at.append(torch.full((missing * length,), -1))
        columns = torch.cat(at)
        counts = (columns >= 0).unflatten(0, (-1, length)).sum(1)
        return cls(
            length,
            window,
            torch.cat(tensors).to(device),
            torch.cat(places).to(device),
            columns.to(device),
            F.pad(counts.cumsum(0), (1, 0)),
            len(widths),
        )

    @property
    def tokens(self) -> int:
        """The number of tokens of a row, a multiple of the window."""
        return len(self.tensors)

    @property
    def width(self) -> int:
        """Numbers of a window."""
        return self.window * self.length

    def cut(self, rows: Tensor) -> Tensor:
        """Return the tokens of rows, one after the other: [rows, tokens × length]."""
        made = rows[:, self.at.clamp_min(0)]
        return made.masked_fill_(self.at < 0, 0.0)

    def joined(self, tokens: Tensor) -> Tensor:
        """Return the rows of such tokens."""
        # The columns are in order, so that leaving out the filling leaves rows.
        return tokens[:, self.at >= 0]

    def window_at(self, first: Tensor) -> Tensor:
        """Return the columns of the windows that begin at these tokens: [windows,
        numbers]; −1 where there is none.
        """
        inside = torch.arange(self.width, device=first.device)
        return self.at[first.unsqueeze(1) * self.length + inside]

"""Several texts in one row, none of which sees another: `--text-pack` for language models
of transformers.

In a row of tokens, ~t stands for a token t that begins another text. The network gets
the tokens themselves, positions that begin anew with every text, and a mask by which a
text sees only itself.
"""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from hpcfed.errors import UserError, one_line
from hpcfed.models.blocks import find_blocks, is_large, shortened
from hpcfed.models.frozen import META

MOST = 1e-4
"""How much logits of a text may differ in float64, beside the largest, if others are in
its row. Norms that round to float32 are far below, a token of another text far above.
"""


def parts(x: Tensor) -> dict[str, Tensor]:
    """Return tokens and positions of rows [rows, length], and who may see whom [rows, 1,
    length, length].
    """
    begins = x < 0
    place = torch.arange(x.shape[1], device=x.device)
    first = torch.where(begins, place, 0).cummax(1).values
    text = begins.cumsum(1)
    same = text[:, :, None] == text[:, None, :]
    earlier = place[:, None] >= place
    return {
        "input_ids": torch.where(begins, ~x, x),
        "attention_mask": (same & earlier)[:, None],
        "position_ids": place - first,
    }


def _take_parts(
    network: nn.Module, given: tuple[Tensor, ...], _: dict[str, Any]
) -> tuple[tuple[()], dict[str, Tensor]]:
    return (), parts(*given)


def keep_apart(network: nn.Module, name: str, length: int, vocabulary: int) -> None:
    """Let a network keep the texts of a row apart; refuse one that cannot."""
    # A network that is only described cannot be tried out.
    if next(network.parameters()).device != META:
        blocks = find_blocks(network) if is_large(network) else None
        short = copy.deepcopy(network) if blocks is None else shortened(network, blocks)
        reason = _failure(short.double().eval(), length, vocabulary)
        if reason:
            raise UserError(
                f"--text-pack: model {name} cannot keep the texts of a row apart "
                f"({reason}); leave it out"
            )
    # A hook, so that the network's parameters keep their names.
    network.register_forward_pre_hook(_take_parts, with_kwargs=True)


def _failure(network: nn.Module, length: int, vocabulary: int) -> str:
    """Return why a text's logits depend on others in its row; empty if they do not."""
    for name in ("attention_mask", "position_ids"):
        if name not in inspect.signature(network.forward).parameters:
            return f"it takes no {name}"
    generator = torch.Generator().manual_seed(20)
    tokens = torch.randint(vocabulary, (1, length), generator=generator)
    tokens = tokens.to(next(network.parameters()).device)
    try:
        with torch.no_grad():
            # A whole row: attention may reach less far than a text is long.
            if not _alike(network, tokens, []):
                return "its attention does not reach as far as a text is long"
            begins = sorted({length // 3, length // 2} - {0})
            if begins and not _alike(network, tokens, begins):
                return "a text would see others"
    # A network may do anything with a mask that it does not expect.
    except Exception as error:
        return one_line(error)[:200]
    return ""


def _alike(network: nn.Module, tokens: Tensor, begins: list[int]) -> bool:
    """Tell whether texts that begin at these places of a row have the logits that each
    has alone.
    """
    row = tokens.clone()
    row[:, begins] = ~row[:, begins]
    found = network(**parts(row)).logits
    alone = []
    for begin, end in zip([0, *begins], [*begins, tokens.shape[1]], strict=True):
        alone.append(network(tokens[:, begin:end]).logits)
    expected = torch.cat(alone, 1)
    return bool((found - expected).abs().max() <= MOST * expected.abs().max())

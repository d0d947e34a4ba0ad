"""How far a reconstructed image is from what a server knows: its gradient is compared
with the upload's, and its pixels with each other.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

Named = Mapping[str, Tensor]


def squares(found: Named, target: Named) -> Tensor:
    """Return Σ ‖g − g′‖² over the uploaded parameters, as DLG and iDLG do."""
    each = [(found[name] - target[name]).square().sum() for name in target]
    return torch.stack(each).sum()


def cosine(found: Named, target: Named) -> Tensor:
    """Return 1 − cos(g, g′) over all uploaded parameters together, which does not see
    how long a gradient is (Geiping et al. 2020).
    """
    products = torch.stack([(found[name] * target[name]).sum() for name in target])
    ours = torch.stack([found[name].square().sum() for name in target]).sum()
    theirs = torch.stack([target[name].square().sum() for name in target]).sum()
    # A gradient of 0 has no direction.
    return 1 - products.sum() / (ours * theirs).sqrt().clamp(min=1e-30)


def total_variation(image: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels: natural images have
    little of it.
    """
    down = (image[..., 1:, :] - image[..., :-1, :]).abs().mean()
    across = (image[..., 1:] - image[..., :-1]).abs().mean()
    return down + across


LOSSES = {"squares": squares, "cosine": cosine}

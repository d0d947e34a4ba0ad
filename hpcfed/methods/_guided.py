"""How pFedGPA's server guides new clients' columns after a local update."""

import torch

from hpcfed.methods._generating import Options
from hpcfed.methods._interface import Federation, Tensor


def guide(
    fed: Federation[Options],
    update: int,
    before: Tensor,
    after: Tensor,
    reference: Tensor | float,
) -> Tensor:
    """Return the columns after the server's guidance. The model counts them from
    `reference`, or from the columns before the update if the run asks for it.
    """
    # The model knows differences to FedAvg's row. So the score of a row, wherever it
    # started, is that of its difference to FedAvg's row. But one local update is as long
    # as those that it has learnt, and several together are not.
    if fed.options.guided_reference == "before":
        reference = before
    with fed.timed("server"):
        led = fed.server.guide(
            fed.clients,
            before - reference,
            after - reference,
            fed.options.guiding(update),
        )
    return led.to(after.dtype) + reference


def keep_within(
    fed: Federation[Options], columns: Tensor, centre: Tensor, generated: Tensor
) -> Tensor:
    """Return columns that lie no farther from the centre, FedAvg's columns, than
    --guided-within times the root mean square distance of known clients' generated ones.
    """
    if fed.options.guided_within is None:
        return columns
    distances = (generated - centre).norm(dim=1)
    # Clients that the server does not know have FedAvg's columns.
    known = distances > 0
    sums = fed.sum(distances.new_tensor([distances.square().sum(), known.sum()]))
    usual = (sums[0] / sums[1].clamp_min(1)).sqrt()
    farthest = fed.options.guided_within * usual
    away = columns - centre
    length = away.norm(dim=1, keepdim=True).clamp_min(torch.finfo(away.dtype).tiny)
    return centre + away * (farthest / length).clamp_max(1)

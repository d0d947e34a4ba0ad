"""What the two networks minimise: samples and noise of every step.

All ranks draw the same numbers for a batch and take their slices of it, so that what
is drawn does not depend on the number of ranks.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from hpcfed.server.diffusion import Schedule
from hpcfed.server.options import Batching
from hpcfed.server.trainer import Loss

Draws = Callable[[int, int], torch.Generator]
"""Returns a generator that is set to (step, number of the draw)."""


def reconstruction_loss(
    x: Tensor, batching: Batching, draws: Draws, *, latent: int
) -> Loss:
    """Return the autoencoder's loss on standardised rows, with noise on rows and
    latents.
    """
    count, width, device = batching.drawn, x.shape[1], x.device

    def loss(network: Callable[..., Tensor], step: int, micro: int) -> Tensor:
        draw, samples = batching.slice_of(micro)
        random = draws(step, draw)
        chosen = torch.randint(len(x), (count,), device=device, generator=random)
        on_rows = torch.randn(count, width, device=device, generator=random)
        on_latents = torch.randn(count, latent, device=device, generator=random)
        return network(x[chosen[samples]], (on_rows[samples], on_latents[samples]))

    return loss


def denoising_loss(
    z: Tensor, batching: Batching, draws: Draws, *, schedule: Schedule
) -> Loss:
    """Return the denoiser's loss on standardised latents: ‖ε − ε(z_t, t)‖², with t
    uniform in 1 … T.
    """
    count, width, device = batching.drawn, z.shape[1], z.device

    def loss(network: Callable[..., Tensor], step: int, micro: int) -> Tensor:
        draw, samples = batching.slice_of(micro)
        random = draws(step, draw)
        chosen = torch.randint(len(z), (count,), device=device, generator=random)
        times = torch.randint(
            1, schedule.steps + 1, (count,), device=device, generator=random
        )
        noises = torch.randn(count, width, device=device, generator=random)
        t, noise = times[samples], noises[samples]
        z_t = schedule.noised(z[chosen[samples]], t, noise)
        return F.mse_loss(network(z_t, t), noise)

    return loss

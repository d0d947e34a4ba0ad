"""What the two networks minimise: samples and noise of every step.

All ranks draw the same numbers for a batch and take their slices of it, so that what
is drawn does not depend on the number of ranks.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from hpcfed.server.diffusion import Schedule
from hpcfed.server.sizes import Batching
from hpcfed.server.trainer import Loss

Draws = Callable[[int, int], torch.Generator]
"""Returns a generator that is set to (step, number of the draw)."""


def reconstruction_loss(
    x: Tensor, batching: Batching, draws: Draws, *, latent: int
) -> Loss:
    """Return the autoencoder's loss on standardised rows, with noise on rows and
    latents.
    """
    count = batching.drawn
    width = x.shape[1]

    def loss(network: Callable[..., Tensor], step: int, micro: int) -> Tensor:
        draw, samples = batching.slice_of(micro)
        random = draws(step, draw)
        # The order of the draws is part of what a seed means.
        chosen = _integers(random, 0, len(x), count)
        on_rows = _normal(random, count, width)
        on_latents = _normal(random, count, latent)
        # Everything is drawn for the whole batch, and sliced afterwards.
        rows = x[chosen[samples]]
        noise = on_rows[samples], on_latents[samples]
        return network(rows, noise)

    return loss


def denoising_loss(
    z: Tensor, batching: Batching, draws: Draws, *, schedule: Schedule
) -> Loss:
    """Return the denoiser's loss on standardised latents: ‖ε − ε(z_t, t)‖², with t
    uniform in 1 … T.
    """
    count = batching.drawn
    width = z.shape[1]

    def loss(network: Callable[..., Tensor], step: int, micro: int) -> Tensor:
        draw, samples = batching.slice_of(micro)
        random = draws(step, draw)
        chosen = _integers(random, 0, len(z), count)
        times = _integers(random, 1, schedule.steps + 1, count)
        noises = _normal(random, count, width)
        z_0 = z[chosen[samples]]
        t = times[samples]
        noise = noises[samples]
        # z_t is drawn at once, without the steps before it.
        z_t = schedule.noised(z_0, t, noise)
        predicted = network(z_t, t)
        return F.mse_loss(predicted, noise)

    return loss


def _integers(random: torch.Generator, low: int, high: int, count: int) -> Tensor:
    """Draw integers from low to high − 1 on the generator's device."""
    device = random.device
    return torch.randint(low, high, (count,), device=device, generator=random)


def _normal(random: torch.Generator, count: int, width: int) -> Tensor:
    """Draw standard normal noise on the generator's device."""
    device = random.device
    return torch.randn(count, width, device=device, generator=random)

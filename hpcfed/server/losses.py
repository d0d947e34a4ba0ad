"""The losses of the server's networks, with the samples and noise of every step.

All ranks draw the same numbers for a batch and take their slices of it, so that draws
do not depend on the number of ranks.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hpcfed.errors import Diverged
from hpcfed.server.diffusion import Schedule
from hpcfed.server.options import ServerOptions
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
        # Do not change the order of draws: every seed would give other results.
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
        # z_t is drawn directly, without the steps before it.
        z_t = schedule.noised(z_0, t, noise)
        predicted = network(z_t, t)
        return F.mse_loss(predicted, noise)

    return loss


Windows = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Returns standardised windows of rows that begin at these tokens, and which of their
numbers are columns. All ranks ask for the same windows.
"""


def token_loss(
    windows: Windows,
    batching: Batching,
    draws: Draws,
    host_draws: Draws,
    *,
    schedule: Schedule,
    num_rows: int,
    num_starts: int,
    filled: float,
) -> Loss:
    """Return the loss of a denoiser of windows: that of `denoising_loss`, over numbers
    that are columns. These are a share `filled` of all numbers of tokens.
    """
    count = batching.drawn

    def chosen(step: int, number: int) -> tuple[Tensor, Tensor]:
        draw, samples = batching.slice_of(number)
        random = host_draws(step, draw)
        rows = _integers(random, 0, num_rows, count)
        first = _integers(random, 0, num_starts, count)
        return rows[samples], first[samples]

    def loss(network: Callable[..., Tensor], step: int, micro: int) -> Tensor:
        # Ranks put together the windows of all of them, since each holds some columns.
        rank, begin = micro % batching.ranks, micro // batching.ranks * batching.ranks
        every = [chosen(step, begin + other) for other in range(batching.ranks)]
        rows, first = (torch.cat(parts) for parts in zip(*every, strict=True))
        z, real = windows(rows, first)
        mine = slice(rank * batching.micro, (rank + 1) * batching.micro)
        z_0, real = z[mine], real[mine]
        draw, samples = batching.slice_of(micro)
        random = draws(step, draw)
        t = _integers(random, 1, schedule.steps + 1, count)[samples]
        noise = _normal(random, count, z.shape[1])[samples] * real
        z_t = schedule.noised(z_0, t, noise)
        predicted = network(z_t, t, every[rank][1].to(z.device))
        error = (predicted - noise) * real
        # Not the mean over these windows: then ranks would weigh theirs differently.
        return error.square().mean() / filled

    return loss


def _integers(random: torch.Generator, low: int, high: int, count: int) -> Tensor:
    """Draw integers from low to high − 1 on the generator's device."""
    device = random.device
    return torch.randint(low, high, (count,), device=device, generator=random)


def _normal(random: torch.Generator, count: int, width: int) -> Tensor:
    """Draw standard normal noise on the generator's device."""
    device = random.device
    return torch.randn(count, width, device=device, generator=random)


# Losses and rows that are not finite end the run, with a line that says what to change.
#
# All server ranks have the same losses and rows, so they raise together.


def check_losses(network: str, losses: np.ndarray, options: ServerOptions) -> None:
    """Raise Diverged if a loss of the network's steps is not finite."""
    bad = np.flatnonzero(~np.isfinite(losses))
    if len(bad):
        raise Diverged(
            f"the server's {network} has diverged: its loss is not finite from step "
            f"{bad[0] + 1} of {len(losses)} on; "
            f"{_advice(options)}"
        )


def check_rows(
    request: str, rows: Tensor, options: ServerOptions, sound: Tensor | None = None
) -> None:
    """Raise Diverged if generated rows are not finite.

    Otherwise they would be evaluated as if nothing had happened. `sound` says which
    rows should be finite; None: all.
    """
    bad = ~rows.isfinite().all(1)
    if sound is not None:
        bad &= sound
    number = int(bad.sum())
    if number:
        raise Diverged(
            f"{number} of {len(rows)} rows that the server made ({request}) are "
            f"not finite; {_advice(options)}"
        )


def _advice(options: ServerOptions) -> str:
    """Suggest options that keep networks from diverging."""
    advice = f"try --server-lr below {options.size.lr:g}"
    if options.server_precision == "bf16":
        advice += " or --server-precision fp32"
    return advice

"""A map of the latents that the server's model learns: two numbers for an upload."""

import numpy as np

from hpcfed.results.server import MOST_MAPPED, LatentMap


def mapped_uploads(count: int) -> np.ndarray:
    """Return which of so many uploads are on the map: evenly chosen, all if few."""
    return np.linspace(0, count - 1, min(count, MOST_MAPPED)).round().astype(np.int64)


def latent_map(latents: np.ndarray, clients: np.ndarray) -> LatentMap:
    """Place latents on their two principal axes."""
    centred = latents - latents.mean(0)
    # The products of few latents with each other are a smaller matrix than those of
    # thousands of columns, and have the same principal axes.
    sizes, axes = np.linalg.eigh(centred @ centred.T)
    largest = [-1, -2] if len(sizes) > 1 else [-1, -1]
    variances = np.maximum(sizes, 0.0)
    places = axes[:, largest] * np.sqrt(variances[largest])
    # An axis may point either way: let its farthest upload be on the positive side.
    farthest = places[np.abs(places).argmax(0), [0, 1]]
    places = places * np.where(farthest < 0, -1.0, 1.0)
    shares = variances[largest] / max(float(variances.sum()), np.finfo(float).tiny)
    return LatentMap(clients, places, shares)

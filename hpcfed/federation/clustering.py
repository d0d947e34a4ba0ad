"""Finds clients with similar data from a few singular vectors of it. A client reveals
nothing else about its samples.

A client's images are the columns of a matrix [features, samples], and its first few
left singular vectors are taken. Their signs are arbitrary, so the largest entry of each
is made positive.
"""

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hpcfed.data.shards import Shard

Clustering = Literal["kmeans", "angles"]
_RANK = 1e-12
"""A squared singular value below this share of the largest counts as zero."""


def left_vectors(shard: Shard, vectors: int, *, classes: int | None = None) -> Tensor:
    """Return the first left singular vectors of every client of the shard, [clients,
    features, vectors], in float64; zeros if a client has too few samples.

    With a number of classes, return `vectors` vectors for each class separately, one
    class after the other.
    """
    found = []
    for index, size in zip(shard.index, shard.sizes, strict=True):
        samples = index[:size]  # the rest of the index is padding
        of_client = []
        for group in _by_class(samples, shard.targets, classes):
            of_client.append(_first_vectors(shard.inputs[group], vectors))
        found.append(torch.cat(of_client, 1))
    if found:
        return torch.stack(found)
    # A rank without clients still has to tell the others how wide a basis is.
    features, width = shard.inputs[0].numel(), vectors * (classes or 1)
    return shard.inputs.new_zeros(0, features, width).double()


def _by_class(samples: Tensor, labels: Tensor, classes: int | None) -> list[Tensor]:
    """Return the samples of each class, or all together without a number of classes."""
    if classes is None:
        return [samples]
    found = []
    for label in range(classes):
        found.append(samples[labels[samples] == label])
    return found


def _first_vectors(images: Tensor, vectors: int) -> Tensor:
    """Return the first left singular vectors of the images; zeros beyond their rank.

    They come from inner products of features, or of samples if there are fewer samples.
    That is faster than decomposing the data, where LAPACK may fail: NVIDIA's for ARM
    ends the process.
    """
    x = images.flatten(1).double()
    if not len(x):
        return x.new_zeros(x.shape[1], vectors)
    few = len(x) < x.shape[1]
    # Eigenvalues, which are squared singular values, come in ascending order.
    values, found = torch.linalg.eigh(x @ x.T if few else x.T @ x)
    values = values.flip(0)[:vectors]
    left = found.flip(1)[:, :vectors]
    if few:
        # Right singular vectors were found: X v = σ u gives the left ones.
        left = F.normalize(x.T @ left, dim=0)
    above_rank = values > _RANK * values[0]
    left = canonical(left.where(above_rank, 0))
    return F.pad(left, (0, vectors - left.shape[1]))


def canonical(left: Tensor) -> Tensor:
    """Return vectors [features, vectors], each with a positive largest entry."""
    if not left.shape[1]:
        return left
    at = left.abs().argmax(0, keepdim=True)
    largest = left.gather(0, at)
    return left * torch.where(largest < 0, -1.0, 1.0)


def assign(
    bases: np.ndarray, clusters: int, *, how: Clustering, seed: int
) -> np.ndarray:
    """Return the cluster of every client. It depends only on the set of their bases:
    the order of clients changes nothing.

    Clients are sorted by the entries of their bases, and clusters are numbered by their
    first appearance in that order. Clients without data have nothing in common, so they
    do not form a cluster: they join the largest one.
    """
    flat = bases.reshape(len(bases), -1)
    found = np.zeros(len(bases), np.int64)
    has_data = flat.any(1)
    holders = np.flatnonzero(has_data)
    if not len(holders):
        return found
    # Rounded, so that ranks and devices that differ in the last bits sort alike.
    keys = np.round(flat[holders], 8)
    order = holders[np.lexsort(keys.T[::-1])]
    clusters = min(clusters, len(order))
    if how == "kmeans":
        labels = _kmeans(flat[order], clusters, seed)
    else:
        labels = _linked(bases[order], clusters)
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    # The rank of each label's first appearance is its new number.
    numbers = np.argsort(np.argsort(first))
    found[order] = numbers[inverse]
    found[~has_data] = np.bincount(found[order]).argmax()
    return found


def _kmeans(points: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    from sklearn.cluster import KMeans  # takes a second to import

    means = KMeans(clusters, n_init=10, random_state=seed % 2**32)
    labels: np.ndarray = means.fit(points).labels_
    return labels


def _linked(bases: np.ndarray, clusters: int) -> np.ndarray:
    """Cluster as PACFL: average linkage by mean principal angles of bases."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    if len(bases) == 1:
        return np.ones(1, np.int64)
    distances = squareform(principal_angles(bases), checks=False)
    tree = linkage(distances, "average")
    labels: np.ndarray = fcluster(tree, clusters, "maxclust")
    return labels


def principal_angles(bases: np.ndarray) -> np.ndarray:
    """Return the mean angle, in degrees, between the spans of any two bases; empty ones
    are at a right angle to all.

    scipy.linalg.subspace_angles is not used: it orthonormalises both bases again for
    every pair, does not accept an empty basis, and rounds differently.
    """
    spans = []
    for base in bases:
        vectors = base[:, np.abs(base).sum(0) > 0]
        spans.append(np.linalg.qr(vectors)[0])
    angles = np.zeros((len(spans), len(spans)))
    for i, one in enumerate(spans):
        for j, other in enumerate(spans[:i]):
            angles[i, j] = angles[j, i] = _mean_angle(one, other)
    return angles


def _mean_angle(one: np.ndarray, other: np.ndarray) -> float:
    """Return the mean principal angle between two orthonormal bases, in degrees."""
    cosines = np.linalg.svd(one.T @ other, compute_uv=False)
    if not len(cosines):
        return 90.0
    # Rounding may bring a cosine above 1.
    angles = np.arccos(cosines.clip(0, 1))
    return float(np.degrees(angles).mean())


def nearest_in_turn(
    points: np.ndarray, centres: np.ndarray, members: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the nearest centre of each client, as they join one after the other. After
    each, its centre moves to the mean that includes the client. Also return the centres
    and numbers of members at the end.

    Clients without data, whose point is zero, join the largest cluster and move
    nothing.
    """
    centres, members = centres.copy(), members.copy()
    found = np.empty(len(points), np.int64)
    for i, point in enumerate(points):
        if not point.any():
            found[i] = members.argmax()
            continue
        distances = np.linalg.norm(centres - point, axis=1)
        # An empty cluster has no mean, and no client to learn from.
        distances[members == 0] = np.inf
        k = found[i] = distances.argmin()
        centres[k] = (members[k] * centres[k] + point) / (members[k] + 1)
        members[k] += 1
    return found, centres, members

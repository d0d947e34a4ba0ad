"""Which clients have similar data, judged by a few singular vectors of it: all that a
client tells of its samples.

A client's images are the columns of a matrix [features, samples]; of its left singular
vectors the first few are taken. They are known but for their signs, so the largest
entry of each is made positive.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hpcfed.data.shards import Shard

Clustering = Literal["kmeans", "angles"]
_RANK = 1e-12
"""A squared singular value below so much of the largest is none."""


def left_vectors(shard: Shard, vectors: int, *, classes: int | None = None) -> Tensor:
    """Of every client of the shard, [clients, features, vectors], in float64; zeros
    where it has too few samples.

    With a number of classes so many vectors of each class by itself, one class after
    the other.
    """
    found = []
    for index, size in zip(shard.index, shard.sizes, strict=True):
        own = index[:size]
        parts = (
            [own]
            if classes is None
            else [own[shard.labels[own] == label] for label in range(classes)]
        )
        found.append(
            torch.cat(
                [_first_vectors(shard.images[part], vectors) for part in parts], 1
            )
        )
    width = vectors * (classes or 1)
    return (
        torch.stack(found)
        if found
        else shard.images.new_zeros(0, shard.images[0].numel(), width).double()
    )


def _first_vectors(images: Tensor, vectors: int) -> Tensor:
    """From products of features with each other, or of samples where these are fewer;
    zeros beyond the data's rank.

    That is quicker than to decompose the data, and LAPACK may fail at it: NVIDIA's for
    ARM ends the process.
    """
    x = images.flatten(1).double()
    if not len(x):
        return x.new_zeros(x.shape[1], vectors)
    few = len(x) < x.shape[1]
    values, found = torch.linalg.eigh(x @ x.T if few else x.T @ x)  # ascending
    values, found = values.flip(0)[:vectors], found.flip(1)[:, :vectors]
    left = torch.nn.functional.normalize(x.T @ found, dim=0) if few else found
    left = canonical(left.where(values > _RANK * values[0], 0))
    return torch.nn.functional.pad(left, (0, vectors - left.shape[1]))


def canonical(left: Tensor) -> Tensor:
    """Vectors [features, vectors] with their signs such that the largest entry of each
    is positive.
    """
    if not left.shape[1]:
        return left
    largest = left.gather(0, left.abs().argmax(0, keepdim=True))
    return left * torch.where(largest < 0, -1.0, 1.0)


def assign(
    bases: np.ndarray, clusters: int, *, how: Clustering, seed: int
) -> np.ndarray:
    """The cluster of every client, a function of the set of their bases: the order of
    clients changes nothing.

    Clients are put in the order of their numbers, and clusters are numbered as they
    first appear in it. Those without data have nothing in common that would make a
    cluster: they are put where most of the others are.
    """
    flat, found = bases.reshape(len(bases), -1), np.zeros(len(bases), np.int64)
    telling = np.flatnonzero(flat.any(1))
    if not len(telling):
        return found
    order = telling[np.lexsort(np.round(flat[telling], 8).T[::-1])]
    clusters = min(clusters, len(order))
    labels = (
        _kmeans(flat[order], clusters, seed)
        if how == "kmeans"
        else _linked(bases[order], clusters)
    )
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    found[order] = np.argsort(np.argsort(first))[inverse]
    found[~flat.any(1)] = np.bincount(found[order]).argmax()
    return found


def _kmeans(points: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    from sklearn.cluster import KMeans  # takes a second to import

    means = KMeans(clusters, n_init=10, random_state=seed % 2**32).fit(points)
    labels: np.ndarray = means.labels_
    return labels


def _linked(bases: np.ndarray, clusters: int) -> np.ndarray:
    """PACFL's procedure: average linkage by the mean of the principal angles between
    clients' bases.
    """
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    if len(bases) == 1:
        return np.ones(1, np.int64)
    tree = linkage(squareform(principal_angles(bases), checks=False), "average")
    labels: np.ndarray = fcluster(tree, clusters, "maxclust")
    return labels


def principal_angles(bases: np.ndarray) -> np.ndarray:
    """The mean angle, in degrees, between the spans of any two bases; empty ones are at
    a right angle to all.
    """
    spans = [np.linalg.qr(base[:, np.abs(base).sum(0) > 0])[0] for base in bases]
    angles = np.zeros((len(spans), len(spans)))
    for i, one in enumerate(spans):
        for j, other in enumerate(spans[:i]):
            cosines = np.linalg.svd(one.T @ other, compute_uv=False).clip(0, 1)
            angles[i, j] = angles[j, i] = (
                np.degrees(np.arccos(cosines)).mean() if len(cosines) else 90.0
            )
    return angles


def nearest_in_turn(
    points: np.ndarray, centres: np.ndarray, members: np.ndarray
) -> np.ndarray:
    """For clients that join one after the other the nearest centre, which then moves to
    the mean that includes them.

    Those without data, whose point is zero, go where most are, and move nothing.
    """
    centres, members = centres.copy(), members.astype(np.float64)
    found = np.empty(len(points), np.int64)
    for i, point in enumerate(points):
        if not point.any():
            found[i] = members.argmax()
            continue
        distance = np.where(
            members > 0, np.linalg.norm(centres - point, axis=1), np.inf
        )  # nobody is in an empty one
        k = found[i] = distance.argmin()
        centres[k] = (members[k] * centres[k] + point) / (members[k] + 1)
        members[k] += 1
    return found

"""FlexLoRA (Bai et al. 2024): the server averages the products B A, and sends back the
factors of the nearest matrix of rank r, by a singular value decomposition.

Section 3: M = Σ pᵢ Bᵢ Aᵢ = U Σ Vᵀ, then B = U Σ and A = Vᵀ, of the r largest singular
values. No other matrix of rank r is nearer to the mean of what clients have learnt; the
mean of their factors is farther. A client of a lower rank takes the first components,
which are the nearest of its own rank.

Where the mean has a lower rank than r, as in a round of clients of low ranks, B is 0 in
the components that are left, and any A would do. They keep the server's A: the vectors
of a decomposition are those of rounding errors there, and clients would train from them.

The mean of the products is a whole matrix per layer, made one layer at a time.
"""

from dataclasses import replace

import torch

from hpcfed.methods import Cohort, Federation, Tensor, _ranks
from hpcfed.methods._adapters import adapters
from hpcfed.methods._ranks import State, trained

EXTENDS = _ranks


class Options(_ranks.Options):
    """It adds no options of its own."""


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    rows, _ = trained(fed, state, cohort)
    rows, cohort = fed.arrived(rows, cohort)
    if not len(cohort.clients):
        return state
    # A client whose row has diverged anywhere is left out everywhere.
    rows = rows.where(rows.isfinite().all(1, keepdim=True), torch.nan)
    w = fed.mean(rows, cohort)
    for adapter in adapters(fed.layout):
        mean = fed.mean(adapter.products(rows), cohort)
        a, b = adapter.factors(w[None])
        known, _ = adapter.factors(state.w[None])
        with fed.timed("aggregate"):
            a[0], b[0] = nearest(mean.view(b.shape[1], -1), known[0])
    # Libraries of different hosts may round differently.
    agreed = torch.from_numpy(fed.agreed(w.cpu().numpy()))
    return replace(state, w=agreed.to(w.device))


def nearest(matrix: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return A [rank, inputs] and B [outputs, rank] of the nearest matrix of a rank.

    `known` is an A, which is kept in components that the matrix does not have.
    """
    u, sizes, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    # A pair of singular vectors may have either sign: take that of the largest number.
    largest = vt.gather(1, vt.abs().argmax(1, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0)
    u, vt = u * signs.mT, vt * signs
    a = known.clone()
    b = matrix.new_zeros(matrix.shape[0], len(known))
    # Rounding errors of the matrix have singular values up to this.
    rounding = max(matrix.shape) * torch.finfo(matrix.dtype).eps * sizes[:1]
    most = min(len(known), int((sizes > rounding).sum()))
    a[:most] = vt[:most]
    b[:, :most] = u[:, :most] * sizes[:most]
    return a, b

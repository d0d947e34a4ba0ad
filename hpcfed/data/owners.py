"""Which client owns each of a user's samples, and what can be wrong with that."""

from collections.abc import Sequence

import numpy as np

from hpcfed.data.arrays import Source


def num_owners(source: Source, splits: Sequence[str], inputs: str) -> int:
    """Return how many clients own training samples; 0 if samples have no owners."""
    there = [split for split in splits if f"{split}_clients" in source.names()]
    if not there:
        return 0
    if "train" not in there:
        raise source.wrong(
            "test_clients without train_clients; give both, or train_clients alone"
        )
    for split in there:
        _check_owners_header(source, split, inputs)
    owners = np.unique(source.read("train_clients"))
    if "test" in there:
        _check_known_owners(source, owners)
    return len(owners)


def _check_owners_header(source: Source, split: str, inputs: str) -> None:
    array = f"{split}_clients"
    shape, dtype = source.header(array)
    samples = source.header(f"{split}_{inputs}")[0][0]
    if dtype.kind not in "iuUS":
        raise source.wrong(f"{array} is {dtype}; clients are whole numbers or texts")
    if shape != (samples,):
        raise source.wrong(
            f"{array} has shape {list(shape)}; it must name one client for each of "
            f"{samples} samples"
        )


def _check_known_owners(source: Source, owners: np.ndarray) -> None:
    """Refuse owners of test samples who have no training samples."""
    of_test = np.unique(source.read("test_clients"))
    if (of_test.dtype.kind in "US") != (owners.dtype.kind in "US"):
        raise source.wrong(
            f"test_clients is {of_test.dtype}, train_clients is {owners.dtype}; give "
            "both numbers or both texts"
        )
    strange = np.setdiff1d(of_test, owners)
    if len(strange):
        more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        raise source.wrong(
            f"test_clients holds {strange[0]}{more}, without training samples; leave "
            "their test samples out"
        )

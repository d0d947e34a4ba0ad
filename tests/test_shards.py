"""Shards: every client finds its own samples, each sample is stored once, and empty
clients are legal.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcfed.data.datasets import ArrayDataset, Split
from hpcfed.data.shards import Shard, shard

CPU = torch.device("cpu")
RNG = np.random.default_rng(0)
DATASET = ArrayDataset(
    "toy",
    {
        "train_inputs": RNG.integers(0, 256, (30, 3, 4, 5), dtype=np.uint8),
        "train_targets": np.arange(30) % 7,
        "test_inputs": RNG.integers(0, 256, (20, 3, 4, 5), dtype=np.uint8),
        "test_targets": np.arange(20) % 7,
    },
    classes=7,
)


def make(lists: list[list[int]], split: Split = "train") -> Shard:
    return shard(
        DATASET,
        split,
        [np.array(own, dtype=np.int64) for own in lists],
        device=CPU,
        dtype=torch.float32,
    )


@settings(max_examples=50, deadline=None)
@given(
    lists=st.lists(st.lists(st.integers(0, 19), max_size=12), max_size=6),
    split=st.sampled_from(["train", "test"]),
)
def test_every_client_finds_its_own_samples_in_order(
    lists: list[list[int]], split: Split
) -> None:
    made = make(lists, split)
    distinct = {sample for own in lists for sample in own}
    assert made.inputs.shape == (len(distinct), 3, 4, 5)
    assert made.targets.shape == (len(distinct),)
    assert made.targets.dtype == made.index.dtype == torch.int64
    assert made.sizes == tuple(len(own) for own in lists)
    assert made.index.shape == (len(lists), max([1, *made.sizes]))
    for positions, own in zip(made.index, lists, strict=True):
        expected = DATASET.inputs(
            split, np.array(own, dtype=np.int64), device=CPU, dtype=torch.float32
        )
        assert torch.equal(made.inputs[positions[: len(own)]], expected)
        assert (
            made.targets[positions[: len(own)]].tolist()
            == DATASET.labels(split)[own].tolist()
        )
        assert not positions[len(own) :].any()


def test_a_shard_without_samples() -> None:
    made = make([[], []])
    assert made.inputs.shape == (0, 3, 4, 5)
    assert made.index.tolist() == [[0], [0]]
    assert made.sizes == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_images_have_the_type_that_was_asked_for(dtype: torch.dtype) -> None:
    assert (
        shard(DATASET, "train", [np.arange(3)], device=CPU, dtype=dtype).inputs.dtype
        == dtype
    )

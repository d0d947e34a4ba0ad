"""Data that users bring: numbers of any shape, tokens, and what is to be predicted."""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import mtrand

from hpcfed import cli, plugins
from hpcfed.data import DatasetInfo, PartitionPlan, Reading, loading
from hpcfed.data import own as own_data
from hpcfed.data.arrays import held_out
from hpcfed.data.brought import notes
from hpcfed.data.datasets import ArrayDataset, Dataset, Split, SyntheticSize
from hpcfed.data.own import loaded
from hpcfed.data.partition import Partition, partition
from hpcfed.data.shards import join, shard, sub_shard
from hpcfed.errors import UserError
from hpcfed.experiment.data import deal, fingerprint, load_dataset
from hpcfed.experiment.run import run
from hpcfed.options import RunConfig, resolve
from hpcfed.options.data import check_data
from hpcfed.options.declare import flags as study_flags
from hpcfed.options.method import Options
from hpcfed.options.partition import check_partition
from hpcfed.options.training import check_training
from hpcfed.results.stored import read_run
from hpcfed.runtime import randomness
from hpcfed.runtime import world as worlds
from hpcfed.studies.plan import Study, points
from tests.conftest import Finished
from tests.runs import assert_same_run, flags, mistake, same, started
from tests.stopped_run import StopAfter

CPU = torch.device("cpu")
RNG = np.random.default_rng(0)
SIZE = SyntheticSize(shape=(1, 4, 4), classes=2, train=4, test=4)


def table() -> dict[str, np.ndarray]:
    """Rows of four features, of which one is constant, with two numbers to predict."""
    arrays = {}
    for split, samples in (("train", 30), ("test", 10)):
        inputs = RNG.normal(3, 2, (samples, 4))
        inputs[:, 2] = 0.1
        arrays[f"{split}_inputs"] = inputs
        arrays[f"{split}_targets"] = RNG.normal(5, 3, (samples, 2))
    return arrays


def sentences() -> dict[str, np.ndarray]:
    arrays = {}
    for split, samples in (("train", 30), ("test", 10)):
        tokens = RNG.integers(0, 50, (samples, 8), dtype=np.int32)
        arrays[f"{split}_inputs"] = tokens[:, :-1]
        arrays[f"{split}_targets"] = tokens[:, 1:]
    return arrays


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_table_is_standardised_by_feature_and_what_is_predicted_stays(
    dtype: torch.dtype,
) -> None:
    arrays = table()
    dataset = ArrayDataset("own", arrays, classes=2, task="regression")
    lists = [np.array([3, 5, 5]), np.array([], np.int64), np.array([0])]
    made = shard(dataset, "test", lists, device=CPU, dtype=dtype)
    train, test = arrays["train_inputs"], arrays["test_inputs"]
    deviation = train.std(axis=0)
    deviation[2] = 1
    expected = torch.from_numpy((test - train.mean(axis=0)) / deviation)
    for client, own in enumerate(lists):
        positions = made.index[client, : len(own)]
        torch.testing.assert_close(
            made.inputs[positions], expected[own].to(dtype), rtol=1e-5, atol=1e-6
        )
        wanted = torch.from_numpy(arrays["test_targets"][own]).to(dtype)
        assert torch.equal(made.targets[positions], wanted)
    assert made.task == "regression"
    assert made.blank is None
    assert dataset.shape == (4,)


def test_tokens_stay_tokens() -> None:
    arrays = sentences()
    dataset = ArrayDataset("own", arrays, classes=50, task="next-token", vocabulary=50)
    lists = [np.array([3, 4]), np.array([9])]
    made = shard(dataset, "train", lists, device=CPU, dtype=torch.float32)
    assert made.inputs.dtype == made.targets.dtype == torch.int64
    assert made.inputs.tolist() == arrays["train_inputs"][[3, 4, 9]].tolist()
    assert made.targets.tolist() == arrays["train_targets"][[3, 4, 9]].tolist()
    both = join([made, sub_shard(made, 1, np.array([7]))])
    assert both.task == "next-token"
    assert both.inputs[both.index[2, :1]].tolist() == [
        arrays["train_inputs"][9].tolist()
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["table", "tokens"])
def test_shards_are_the_same_on_a_gpu(kind: str) -> None:
    if kind == "table":
        dataset = ArrayDataset("own", table(), classes=2, task="regression")
    else:
        dataset = ArrayDataset(
            "own", sentences(), classes=50, task="next-token", vocabulary=50
        )
    lists = [np.array([3, 5]), np.array([0])]
    gpu = torch.device("cuda")
    here = shard(dataset, "test", lists, device=CPU, dtype=torch.float32)
    there = shard(dataset, "test", lists, device=gpu, dtype=torch.float32)
    assert there.inputs.is_cuda and there.inputs.dtype == here.inputs.dtype
    torch.testing.assert_close(there.inputs.cpu(), here.inputs)
    assert torch.equal(there.targets.cpu(), here.targets)


# Arrays in a file


def save(folder: Path, arrays: dict[str, Any]) -> str:
    np.savez(folder / "own.npz", **arrays)
    return f"file:{folder / 'own.npz'}"


def load(name: str, *, natural: bool = False, options: str = "{}") -> Dataset:
    reading = Reading(options, natural=natural)
    return loading.load(
        name, root=None, download=False, seed=0, synthetic=SIZE, reading=reading
    )


def info(name: str, **options: Any) -> DatasetInfo:
    return RunConfig(dataset=name, **options).data()


def refused(name: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        check_data(RunConfig(dataset=name, **options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def inputs_of(dataset: Dataset, split: Split) -> torch.Tensor:
    index = np.arange(dataset.size(split))
    return dataset.inputs(split, index, device=CPU, dtype=torch.float64)


def targets_of(dataset: Dataset, split: Split) -> torch.Tensor:
    index = np.arange(dataset.size(split))
    return dataset.targets(split, index, device=CPU, dtype=torch.float64)


TOKENS = RNG.integers(0, 9, (20, 6))
LABELS = np.arange(20) % 3
NUMBERS = RNG.normal(size=(20, 4))
KINDS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "table": (
        {"inputs": NUMBERS, "labels": LABELS},
        ("classification", (4,), 3, 0, "mlp"),
    ),
    "numbers to predict": (
        {"inputs": NUMBERS, "targets": NUMBERS[:, :2]},
        ("regression", (4,), 2, 0, "mlp"),
    ),
    "one number to predict": (
        {"inputs": NUMBERS.astype("f4"), "targets": NUMBERS[:, 0].astype("f4")},
        ("regression", (4,), 1, 0, "mlp"),
    ),
    "series": (
        {"inputs": RNG.normal(size=(20, 2, 9)), "targets": LABELS},
        ("classification", (2, 9), 3, 0, "mlp"),
    ),
    "image": (
        {"inputs": RNG.normal(size=(20, 5, 28, 28)), "targets": LABELS},
        ("classification", (5, 28, 28), 3, 0, "mlp"),
    ),
    "tokens": ({"inputs": TOKENS}, ("next-token", (5,), 9, 9, "")),
    "tokens with targets": (
        {"inputs": TOKENS, "targets": np.where(TOKENS > 4, TOKENS, -100)},
        ("next-token", (6,), 9, 9, ""),
    ),
    "sentences with a class": (
        {"inputs": TOKENS.astype("i4"), "labels": LABELS},
        ("classification", (6,), 3, 9, ""),
    ),
}


def both_splits(arrays: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{split}_{kind}": values
        for split in ("train", "test")
        for kind, values in arrays.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_file_holds_says_what_it_is_for(kind: str, tmp_path: Path) -> None:
    arrays, expected = KINDS[kind]
    name = save(tmp_path, both_splits(arrays))
    about = info(name)
    found = (about.task, about.shape, about.classes, about.vocabulary, about.model)
    assert found == expected
    dataset = load(name)
    assert (dataset.task, dataset.shape, dataset.classes) == expected[:3]
    assert inputs_of(dataset, "test").shape == (20, *about.shape)
    targets = targets_of(dataset, "test")
    assert targets.is_floating_point() == (about.task == "regression")
    if about.task == "regression":
        assert targets.shape == (20, about.classes)


def test_tokens_without_targets_are_to_be_continued(tmp_path: Path) -> None:
    dataset = load(save(tmp_path, {"train_inputs": TOKENS, "test_inputs": TOKENS[:3]}))
    assert inputs_of(dataset, "train").tolist() == TOKENS[:, :-1].tolist()
    assert targets_of(dataset, "train").tolist() == TOKENS[:, 1:].tolist()
    assert targets_of(dataset, "test").tolist() == TOKENS[:3, 1:].tolist()


OWNERS = np.arange(20) % 4
BAD: list[tuple[dict[str, Any], str]] = [
    ({"train_images": np.zeros((20, 4, 4))}, "mean the same; keep one"),
    ({"train_labels": LABELS}, "mean the same; keep one"),
    (
        {"train_targets": LABELS.astype(str)},
        "<U21; classes must be integers 0, 1, 2, …, as by",
    ),
    ({"train_inputs": NUMBERS[:, 0]}, "[N, features]"),
    ({"train_inputs": NUMBERS.astype("f2")}, "float32 or float64 numbers"),
    ({"train_inputs": TOKENS.astype("u1")}, "images as train_images"),
    ({"train_inputs": TOKENS[None].repeat(20, 0)}, "tokens, [N, length]"),
    ({"train_inputs": np.where(NUMBERS > 1, np.nan, NUMBERS)}, "NaN or infinite"),
    (
        {"train_targets": np.where(LABELS, np.nan, 0.5), "test_targets": LABELS * 0.5},
        "train_targets holds NaN or infinite",
    ),
    ({"test_inputs": TOKENS[:, :4]}, "give both the same type"),
    ({"test_inputs": NUMBERS[:, :3]}, "give both the same shape"),
    ({"train_targets": LABELS.astype("f2")}, "float64 numbers to predict"),
    ({"train_targets": np.zeros((20, 2, 2))}, "one row of 20 targets"),
    ({"train_targets": LABELS[:9]}, "9 targets for 20 samples"),
    ({"test_targets": LABELS * 1.0}, "is for classification, test_targets for regr"),
    ({"train_targets": LABELS - 1}, "holds -1"),
    ({"test_targets": LABELS + 1}, "test_targets holds 3"),
    ({"classes": np.array(2)}, "holds 2, and classes is 2"),
    ({"train_targets": 0 * LABELS, "test_targets": 0 * LABELS}, "has one class, 0"),
    ({"classes": np.array("x")}, "one whole number"),
    ({"train_clients": OWNERS[:5]}, "for each of 20 samples"),
    ({"train_clients": OWNERS * 0.5}, "whole numbers or texts"),
    ({"test_clients": OWNERS}, "test_clients without train_clients"),
    (
        {"train_clients": OWNERS, "test_clients": OWNERS + 1},
        "test_clients holds 4, without training samples",
    ),
    (
        {"train_clients": OWNERS, "test_clients": OWNERS.astype(str)},
        "both numbers or both texts",
    ),
]
BAD_TOKENS: list[tuple[dict[str, Any], str]] = [
    ({"train_inputs": TOKENS - 1}, "holds -1; tokens are 0, 1, 2"),
    ({"test_inputs": TOKENS + 1}, "holds token 9, the vocabulary is 0 to 8; give `voc"),
    ({"vocabulary": np.array(5)}, "holds token 8, the vocabulary is 0 to 4; give a la"),
    ({"train_inputs": TOKENS * 1000}, "among only 120 tokens"),
    ({"train_inputs": TOKENS[:, :1], "test_inputs": TOKENS[:, :1]}, "have one token"),
    (
        {"train_targets": TOKENS - 3, "test_targets": TOKENS},
        "-100 stands where there is none",
    ),
    ({"train_targets": TOKENS, "test_targets": TOKENS * 2}, "test_targets holds tok"),
]


@pytest.mark.parametrize(("change", "part"), BAD + BAD_TOKENS)
def test_what_is_wrong_with_a_file_is_one_line(
    change: dict[str, Any], part: str, tmp_path: Path
) -> None:
    whole = both_splits({"inputs": NUMBERS, "targets": LABELS})
    if any(part == words for _, words in BAD_TOKENS):
        whole = both_splits({"inputs": TOKENS})
    assert part in refused(save(tmp_path, whole | change))


FROM_ONE = LABELS + 1
IMAGES = RNG.normal(size=(20, 4, 4))
NO_ZERO = "labels go up to 3, which makes 4 classes, but no sample has 0; number them"
REMARKS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "from 1": ({"images": IMAGES, "labels": FROM_ONE}, [NO_ZERO]),
    "gaps": (
        {"images": IMAGES, "labels": LABELS * 4},
        ["makes 9 classes, but no sample has 1 and 5 more"],
    ),
    "all": ({"images": IMAGES, "labels": LABELS}, []),
    "given": ({"images": IMAGES, "labels": FROM_ONE, "classes": 5}, []),
    "one that only tests have": (
        {"images": IMAGES, "train_labels": FROM_ONE, "test_labels": LABELS},
        [],
    ),
    "whole numbers": (
        {"inputs": NUMBERS, "targets": LABELS},
        ["whole numbers, so they are 3 classes; as floats they are numbers to predict"],
    ),
    "channels last": (
        {"inputs": RNG.normal(size=(20, 6, 5, 3)), "labels": LABELS},
        ["[6, 5, 3] have 6 channels: the first axis; give images of 3 as train_images"],
    ),
    "channels first": (
        {"inputs": RNG.normal(size=(20, 3, 5, 3)), "labels": LABELS},
        [],
    ),
    "named classes": ({"inputs": NUMBERS, "labels": LABELS}, []),
    "numbers": ({"inputs": NUMBERS, "targets": LABELS * 1.0}, []),
}


@pytest.mark.parametrize("kind", REMARKS)
def test_what_was_taken_for_classes_is_told(kind: str, tmp_path: Path) -> None:
    arrays, parts = REMARKS[kind]
    whole = both_splits(arrays)
    for array in ("train_labels", "test_labels", "classes"):
        if array in arrays:
            whole[array] = arrays[array]
    told = notes(save(tmp_path, whole), root=None, reading=Reading())
    assert len(told) == len(parts)
    assert all(part in line for part, line in zip(parts, told, strict=True))


# Natural clients


@settings(max_examples=40, deadline=None)
@given(
    train=st.lists(st.integers(0, 8), min_size=1, max_size=60),
    clients=st.integers(1, 9),
    seed=st.integers(0, 99),
    validation=st.integers(0, 1),
)
def test_natural_clients_have_their_own_samples(
    train: list[int], clients: int, seed: int, validation: int
) -> None:
    _, owners = np.unique(train, return_inverse=True)
    num_owners = int(owners.max()) + 1
    clients = min(clients, num_owners)
    test_owners = np.arange(20) % (num_owners + 1) - 1
    plan = PartitionPlan(
        scheme="natural",
        clients=clients,
        classes=1,
        seed=seed,
        alpha=1.0,
        classes_per_client=1,
        uniform_share=0.0,
        train_per_client=1,
        test_per_client=1,
        validation=validation,
    )

    def deal(plan: PartitionPlan) -> Partition:
        labels = np.zeros(len(owners), np.int64)
        return partition(plan, labels, np.zeros(20), owners=(owners, test_owners))

    dealt = deal(plan)
    assert dealt.owners is not None
    chosen = dealt.owners.tolist()
    assert chosen == sorted(set(chosen)) and len(chosen) == clients
    for client, owner in enumerate(chosen):
        own = np.setdiff1d(np.flatnonzero(owners == owner), dealt.validation)
        assert dealt.train[client].tolist() == own.tolist()
        assert (
            dealt.test[client].tolist() == np.flatnonzero(test_owners == owner).tolist()
        )
    assert len(dealt.validation) == validation
    if clients > 1:
        fewer = deal(replace(plan, clients=clients - 1)).owners
        later = deal(replace(plan, new_clients=1)).owners
        assert fewer is not None and later is not None
        assert set(fewer) < set(chosen), "more clients include the fewer"
        assert later[:-1].tolist() == fewer.tolist(), "the last one joins later"


@given(owners=st.lists(st.integers(0, 5), min_size=1, max_size=80))
def test_every_tenth_sample_is_held_out(owners: list[int]) -> None:
    numbers = np.array(owners)
    test = held_out(numbers)
    for owner in set(owners):
        own = test[numbers == owner]
        if len(own) < 10:
            assert own.tolist() == [False] * (len(own) - 1) + [len(own) > 1]
        else:
            assert np.flatnonzero(own).tolist() == list(range(9, len(own), 10))


@pytest.mark.parametrize("has_test", [True, False])
def test_clients_without_a_test_set_are_judged_by_samples_of_their_own(
    has_test: bool, tmp_path: Path
) -> None:
    inputs = np.arange(64.0).reshape(32, 2)
    owners = np.array(["ann", "bob", "cleo"])[np.arange(32) % 3]
    arrays = {
        "train_inputs": inputs,
        "train_targets": inputs[:, :1],
        "train_clients": owners,
    }
    if has_test:
        arrays |= {"test_inputs": -inputs[:4], "test_targets": -inputs[:4, :1]}
    dataset = load(save(tmp_path, arrays), natural=True)
    shared = 4 if has_test else 0
    # What is to be predicted tells the samples apart.
    train = targets_of(dataset, "train")[:, 0].tolist()
    test = targets_of(dataset, "test")[:, 0].tolist()
    assert sorted(train + test[shared:]) == inputs[:, 0].tolist(), "each sample once"
    of_train, of_test = dataset.owners("train"), dataset.owners("test")
    assert of_train is not None and of_test is not None
    assert of_test[:shared].tolist() == [-1] * shared
    assert dataset.owner_names is not None
    assert dataset.owner_names.tolist() == ["ann", "bob", "cleo"]
    for values, numbers in ((train, of_train), (test[shared:], of_test[shared:])):
        expected = [owners[int(value) // 2] for value in values]
        assert dataset.owner_names[numbers].tolist() == expected
    # Numbers are standardised by what is left for training.
    assert torch.allclose(inputs_of(dataset, "train").mean(0), torch.zeros(2).double())


def test_a_data_set_with_owners_is_dealt_out_by_them(tmp_path: Path) -> None:
    arrays = both_splits({"inputs": NUMBERS, "targets": LABELS, "clients": OWNERS})
    name = save(tmp_path, arrays)

    def chosen(**values: Any) -> tuple[str, int]:
        values = {"dataset": name, **values}
        config = resolve(values, dict.fromkeys(values, ""), Options).config
        return config.partition, config.clients

    assert chosen() == ("natural", 4)
    assert chosen(clients=3) == ("natural", 3)
    assert chosen(new_clients=1) == ("natural", 3)
    assert chosen(partition="iid") == ("iid", 20)
    plain = save(tmp_path, both_splits({"inputs": NUMBERS, "targets": NUMBERS}))
    assert chosen(dataset=plain) == ("iid", 20)


NATURAL_MISTAKES = [
    ({"clients": 5}, "--clients 5, but"),
    ({"clients": 4, "new_clients": 1}, "--clients 4 and --new-clients 1, but"),
    ({"clients": 2, "new_clients": 1, "new_classes": 0.5}, "--new-classes 0.5"),
    ({"dataset": "digits"}, "digits does not say whose samples are whose"),
]


@pytest.mark.parametrize(("values", "part"), NATURAL_MISTAKES)
def test_natural_clients_that_are_not_there(
    values: dict[str, Any], part: str, tmp_path: Path
) -> None:
    arrays = both_splits({"inputs": NUMBERS, "targets": LABELS, "clients": OWNERS})
    values = {"dataset": save(tmp_path, arrays), "partition": "natural", **values}
    with pytest.raises(UserError, match=part):
        check_partition(RunConfig(**values))


# Functions


FUNCTIONS = """
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

calls = []
x = torch.arange(48.0).reshape(12, 4)


def arrays(scale=1.0, *, users=3):
    calls.append(scale)
    y = [i % 2 for i in range(12)]
    who = [f"user {i % users}" for i in range(12)]
    return {
        "train_inputs": scale * x, "train_targets": torch.tensor(y), "train_clients": who,
        "test_inputs": x[:5].numpy(), "test_targets": y[:5],
    }


class Items(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i % len(self.items)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(x[i], float(i)) for i in range(3)])


class Pair:
    def __init__(self):
        self.train = Items([(x[i], i % 2, i % 4) for i in range(12)])
        self.test = Items([(x[i], i % 2, i % 4) for i in range(5)])


def streams():
    return Stream(), Stream()


def pictures():
    one = np.zeros((6, 6, 3), np.uint8)
    return Items([(one + i, i % 2) for i in range(4)]), Items([(one, 1)])


def words():
    items = Items([(torch.arange(5), torch.arange(1, 6))])
    return {"train": items, "test": items, "vocabulary": 7}


constant = {"train_inputs": x, "train_labels": np.arange(12) % 2,
            "test_inputs": x, "test_labels": np.arange(12) % 2}


def unseeded():
    x = np.random.default_rng().normal(size=(12, 4))
    return constant | {"train_inputs": x}


def typo():
    return {"train_input": x}


def objects():
    return {"train_inputs": [object()]}


def ragged():
    return Items([(x[0], 0), (x[0, :2], 0)]), Items([(x[0], 0)])


def lonely():
    return Items([x[0]]), Items([x[0]])


def two_inputs():
    return Items([((x[0], x[1]), 0)]), Items([((x[0], x[1]), 0)])


class Noisy(Items):
    def __getitem__(self, index):
        return self.items[index][0] + torch.randn(4), self.items[index][1]


def noisy():
    return Noisy([(x[0], 0), (x[1], 1)]), Items([(x[0], 0)])


def some_have_clients():
    return Items([(x[0], 0), (x[0], 0, 1)]), Items([(x[0], 0)])


def nothing():
    return None


def empty():
    return Items([]), Items([])


class Endless(Items):
    def __len__(self):
        return 10**12


def endless():
    items = Endless([(x[0], 0)])
    return items, items


def broken():
    raise RuntimeError("the disk is gone\\nfor good")


def half():
    return {"train_inputs": x}
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return f"{tmp_path / 'mine.py'}:"


def test_a_function_gives_the_same_as_a_file(functions: str, tmp_path: Path) -> None:
    x = np.arange(48, dtype=np.float32).reshape(12, 4)
    y = np.arange(12) % 2
    stored = {"train_inputs": 3 * x, "train_targets": y, "test_inputs": x[:5]}
    stored |= {
        "test_targets": y[:5],
        "train_clients": [f"user {i % 5}" for i in range(12)],
    }
    expected = load(save(tmp_path, stored))
    name = functions + "arrays"
    options = '{"scale": 3.0, "users": 5}'
    made = load(name, options=options)
    assert isinstance(made, ArrayDataset) and isinstance(expected, ArrayDataset)
    assert made.fingerprint == expected.fingerprint
    assert info(name, dataset_options=options).owners == 5
    assert load(name, options=options).size("train") == 12
    calls = plugins.load_object(functions + "calls", "data set")
    assert calls == [3.0], "called once in a process"


ITEMS = {
    "Pair": ("classification", (4,), 2, 4),
    "streams": ("regression", (4,), 1, 0),
    "pictures": ("classification", (3, 6, 6), 2, 0),
    "words": ("next-token", (5,), 7, 0),
    "constant": ("classification", (4,), 2, 0),
}


@pytest.mark.parametrize("function", ITEMS)
def test_torch_data_sets_are_gathered(function: str, functions: str) -> None:
    about = info(functions + function)
    assert (about.task, about.shape, about.classes, about.owners) == ITEMS[function]
    if function == "Pair":
        dataset = load(functions + function)
        x = torch.arange(48.0).double().reshape(12, 4)
        scaled = (x - x.mean(0)) / x.std(0, correction=0)
        torch.testing.assert_close(inputs_of(dataset, "test"), scaled[:5])
        assert targets_of(dataset, "test").tolist() == [0, 1, 0, 1, 0]


def test_items_that_are_drawn_are_told(functions: str) -> None:
    told = notes(functions + "noisy", root=None, reading=Reading())
    drawn = [line for line in told if "differ when they are read again" in line]
    assert len(drawn) == 1 and "items of its train set" in drawn[0]


WRONG = [
    ("typo", "unknown key 'train_input'; did you mean 'train_inputs'?"),
    ("objects", "train_inputs holds Python objects"),
    ("ragged", "have shapes [2] and [4]"),
    ("endless", "its train set of 1,000,000,000,000 items needs"),
    ("lonely", "items must be (input, target)"),
    ("two_inputs", "an input of its train set is 2 arrays; give one, and let"),
    ("some_have_clients", "give every item one"),
    ("nothing", "returns NoneType; it must return a dict"),
    ("empty", "its train set is empty"),
    ("broken", "failed: RuntimeError: the disk is gone (mine.py, line"),
    ("half", "no array test_inputs; the dict must hold"),
    ("array", "did you mean 'arrays'?"),
    ("x", "returns Tensor"),
]


@pytest.mark.parametrize(("function", "part"), WRONG)
def test_what_is_wrong_with_a_function_is_one_line(
    function: str, part: str, functions: str
) -> None:
    assert part in refused(functions + function)


def test_options_that_a_function_does_not_take(functions: str) -> None:
    line = refused(functions + "arrays", dataset_options='{"user": 3}')
    assert "'user'" in line and "it takes: scale, users" in line
    assert "takes no --dataset-options" in refused(
        functions + "constant", dataset_options='{"user": 3}'
    )
    assert "say which function" in refused(functions.rstrip(":"))


def test_an_installed_data_set_goes_by_its_name(
    functions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plugins.load_object(functions + "arrays", "data set")
    entry = EntryPoint("clinic", "clinics:load", "hpcfed.datasets")
    monkeypatch.setattr(plugins, "installed", lambda group: {"clinic": entry})
    monkeypatch.setattr(plugins, "load_installed", lambda _: made)
    assert info("clinic").owners == 3
    assert "did you mean 'clinic'?" in refused("clinics")


# Folders of text


TEXTS = {
    "1790_ann_x.txt": "abcabcabcabcabcabcabZ",
    "1791_ann_y.txt": "hello, world\n",
    "1792_bob_x.txt": "äöü äöü äöü",
}


@pytest.fixture
def texts(tmp_path: Path) -> str:
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "README.md").write_text("no text of a client")
    return f"text:{tmp_path}"


def predicted(dataset: Dataset, split: Split, owner: int) -> list[tuple[int, int]]:
    """Return all pairs of a token and the one that follows it, without padding."""
    owners = dataset.owners(split)
    assert owners is not None
    mine = torch.from_numpy(np.flatnonzero(owners == owner))
    inputs = inputs_of(dataset, split)[mine].flatten().tolist()
    targets = targets_of(dataset, split)[mine].flatten().tolist()
    pairs = zip(inputs, targets, strict=True)
    return [pair for pair in pairs if pair[1] != -100]


@pytest.mark.parametrize("length", [1, 4, 100])
def test_every_token_of_a_text_is_predicted_once(texts: str, length: int) -> None:
    config = RunConfig(dataset=texts, text_length=length)
    dataset = loading.load(
        texts, root=None, download=False, seed=0, synthetic=SIZE, reading=config.reading
    )
    parts = {}
    for name, text in TEXTS.items():
        cut = len(text) - round(0.1 * len(text))
        parts[name.removesuffix(".txt")] = (text[:cut], text[cut:])
    letters = sorted(set("".join(train for train, _ in parts.values())))
    number = {letter: 1 + at for at, letter in enumerate(letters)}
    about = config.data()
    assert (about.task, about.shape) == ("next-token", (length,))
    assert about.vocabulary == about.classes == len(letters) + 1
    assert dataset.owner_names is not None
    assert dataset.owner_names.tolist() == list(parts)
    for owner, (train, test) in enumerate(parts.values()):
        for split, part in (("train", train), ("test", test)):
            tokens = [number.get(letter, 0) for letter in part]
            assert predicted(dataset, split, owner) == list(pairwise(tokens))
    assert number.get("Z") is None, "a letter of the test set alone is unknown"


def test_texts_of_one_author_are_one_client(texts: str) -> None:
    config = RunConfig(
        dataset=texts, text_clients="_(.+)_", text_tokens="bytes", text_test=0.4
    )
    about = config.data()
    assert (about.owners, about.vocabulary) == (2, 256)
    dataset = loading.load(
        texts, root=None, download=False, seed=0, synthetic=SIZE, reading=config.reading
    )
    assert dataset.owner_names is not None
    assert dataset.owner_names.tolist() == ["ann", "bob"]
    content = TEXTS["1792_bob_x.txt"].encode()
    train = content[: len(content) - round(0.4 * len(content))]
    assert predicted(dataset, "train", 1) == list(pairwise(train))


TEXT_MISTAKES = [
    ({"text_clients": "("}, "not a regular expression"),
    ({"text_clients": "carl"}, "finds no client in 1790_ann_x.txt"),
    ({"text_test": 0.01}, "leaves no text for testing"),
    ({"text_length": 5000}, "--text-length 5000, but the longest file"),
]


@pytest.mark.parametrize(("options", "part"), TEXT_MISTAKES)
def test_texts_that_cannot_be_read(
    options: dict[str, Any], part: str, texts: str
) -> None:
    assert part in refused(texts, **options)


def test_folders_without_texts(tmp_path: Path) -> None:
    assert "needs a folder" in refused("text:")
    assert "no folder" in refused(f"text:{tmp_path / 'nowhere'}")
    assert "no .txt file" in refused(f"text:{tmp_path}")
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    assert "is not UTF-8" in refused(f"text:{tmp_path}")
    (tmp_path / "a.txt").write_bytes(b"a")
    assert "fewer than two chars" in refused(f"text:{tmp_path}")


def test_no_network_of_the_catalogue_takes_tokens(texts: str) -> None:
    with pytest.raises(UserError, match="name one of yours, as in --model"):
        check_training(RunConfig(dataset=texts))


# Hugging Face


def test_a_folder_of_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra hf is not installed")
    rows = {"features": NUMBERS.tolist(), "label": LABELS.tolist(), "who": ["a"] * 20}
    whole = datasets.DatasetDict(
        {
            "train": datasets.Dataset.from_dict(rows),
            "validation": datasets.Dataset.from_dict(rows),
        }
    )
    whole.save_to_disk(tmp_path / "rows")
    name = f"hf-data:{tmp_path / 'rows'}"
    options = '{"test": "validation", "client": "who"}'
    about = info(name, dataset_options=options)
    assert (about.task, about.shape, about.classes) == ("classification", (4,), 3)
    assert about.owners == 1
    assert "no column nobody" in refused(name, dataset_options='{"client": "nobody"}')
    assert "no split test; name one" in refused(name)


def test_a_class_that_hugging_face_has_no_sample_of(tmp_path: Path) -> None:
    """The remark's advice makes it silent, and is refused where it cannot be right."""
    datasets = pytest.importorskip("datasets", reason="the extra hf is not installed")
    rows = {"features": NUMBERS.tolist(), "label": (2 * LABELS).tolist()}
    both = dict.fromkeys(("train", "test"), datasets.Dataset.from_dict(rows))
    datasets.DatasetDict(both).save_to_disk(tmp_path / "rows")
    name = f"hf-data:{tmp_path / 'rows'}"
    reading = Reading()
    (remark,) = [
        line for line in notes(name, root=None, reading=reading) if "no sa" in line
    ]
    assert remark.endswith("or give `classes` in --dataset-options")
    told = RunConfig(dataset=name, dataset_options='{"classes": 7}')
    assert told.data().classes == 7
    reading = Reading(told.dataset_options)
    assert not any("no sa" in line for line in notes(name, root=None, reading=reading))
    assert "one whole number" in refused(name, dataset_options='{"classes": "7"}')
    assert "and classes is 3" in refused(name, dataset_options='{"classes": 3}')


def test_hugging_face_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "install hpcfed[hf]" in refused(f"hf-data:{tmp_path}")
    assert "needs a folder" in refused("hf-data:")
    assert "has no colum" in refused(
        f"hf-data:{tmp_path}", dataset_options='{"colum": 1}'
    )


# Whole runs


DRAWING = """
import random
import numpy as np
import torch

bias = random.random()


class Items:
    def __len__(self):
        return 30

    def __getitem__(self, position):
        if position >= 30:
            raise IndexError
        drawn = torch.rand(3), torch.from_numpy(np.random.rand(3))
        return torch.cat(drawn) + bias + random.random(), random.randrange(2)


def items():
    return Items(), Items()


def array():
    return {f"{split}_inputs": np.random.rand(30, 3) for split in ("train", "test")} | {
        f"{split}_labels": torch.randint(2, (30,)) for split in ("train", "test")
    }
"""


@pytest.mark.parametrize("name", ["items", "array"])
def test_what_a_function_draws_is_the_same_everywhere(
    name: str, tmp_path: Path
) -> None:
    """Whatever was drawn before, and beside other seeds; nobody else's numbers change."""
    path = tmp_path / "drawing.py"
    path.write_text(DRAWING)
    data = f"{path}:{name}"
    common = flags(dataset=data, model="mlp", clients=2, rounds=1, precision="fp64")
    torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
    before = torch.get_rng_state(), random.getstate(), mtrand.get_bit_generator()
    started(*common, "--seed", 1, "--out", tmp_path / "alone")
    after = torch.get_rng_state(), random.getstate(), mtrand.get_bit_generator()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    arrays = loaded(data, "{}").arrays
    loaded.cache_clear()
    torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
    started(*common, "--seeds", "0..1", "--out", tmp_path / "both")
    again = loaded(data, "{}").arrays
    assert all(np.array_equal(again[array], arrays[array]) for array in arrays)
    both = tmp_path / "both"
    assert_same_run(both / "seed-1", tmp_path / "alone", tolerance=1e-12)


OF_FILE = """
import numpy as np

GENERATOR = np.random.default_rng(3)


class Rows:
    @staticmethod
    def drawn(count):
        return GENERATOR.random((count, 3))


def rows():
    given = {f"{split}_inputs": Rows.drawn(9) for split in ("train", "test")}
    return given | {f"{split}_labels": np.arange(9) % 2 for split in ("train", "test")}
"""


def test_a_generator_of_the_file_that_goes_on_is_told(tmp_path: Path) -> None:
    """The next run of a program gets other samples."""
    path = tmp_path / "going_on.py"
    path.write_text(OF_FILE)
    first = loaded(f"{path}:rows", "{}")
    loaded.cache_clear()
    second = loaded(f"{path}:rows", "{}")
    assert first.notes == ()
    (line,) = second.notes
    assert "draws from GENERATOR, which has moved on since the last run" in line


def test_the_example_runs_as_it_says(tmp_path: Path) -> None:
    path = Path(__file__).parent.parent / "benchmarks" / "examples" / "hospitals.py"
    words = flags(
        dataset=f"{path}:patients",
        dataset_options='{"hospitals": 5}',
        rounds=5,
        lr=0.02,
        epochs=2,
        batch_size=16,
    )
    record = read_run(started(*words, "--out", tmp_path / "run"))
    assert record.config["clients"] == 5
    assert record.rounds["accuracy"][-1] > 0.8


def test_a_study_hands_tables_on(functions: str, tmp_path: Path) -> None:
    study = Study(
        common={"dataset": f"{functions}arrays", "dataset_options": {"users": 4}},
        sweep={"clients": [2, 4]},
    )
    for point in points(study, tmp_path / "study.toml"):
        assert point.settings.config.partition == "natural"
        words = study_flags(point.given)
        config = cli.parse_run(words).config
        assert config == point.settings.config


def lists_of(**options: Any) -> list[list[int]]:
    config = RunConfig(clients=4, **options)
    dataset = loading.load(
        "digits", root=None, download=False, seed=config.seed, synthetic=SIZE
    )
    dealt = deal(config, dataset, validates=True)
    return [
        own.tolist() for own in (*dealt.partition.train, dealt.partition.validation)
    ]


def test_the_data_has_a_seed_of_its_own() -> None:
    assert lists_of(seed=3, data_seed=0) == lists_of(seed=0)
    assert lists_of(seed=3) == lists_of(seed=0, data_seed=3)
    assert lists_of(seed=3) != lists_of(seed=3, data_seed=0), "0 is a seed, too"


def test_attacks_that_need_classes_or_images(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name = save(tmp_path, both_splits({"inputs": NUMBERS, "targets": NUMBERS}))
    words = ("run", "--dataset", name, "--attack", "label-flip")
    assert "needs classes" in mistake(capsys, *words)
    assert "no images" in mistake(capsys, "attack", "idlg", "--dataset", name)


def test_a_run_of_some_natural_clients(
    functions: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = flags(dataset=f"{functions}arrays", rounds=1, clients=2, data_seed=4)
    cli.main(["run", *options, "--out", str(tmp_path / "run")])
    told = "".join(capsys.readouterr())
    assert "2 of 3 natural clients, drawn by --data-seed 4" in told
    with h5py.File(tmp_path / "run" / "run.h5") as file:
        names = file["clients/owner"].asstr()[()].tolist()
    drawn = randomness.generator(4, "natural clients").permutation(3)[:2]
    assert names == [f"user {number}" for number in sorted(drawn)]


def test_a_run_of_natural_clients_goes_on_where_it_stopped(
    functions: str, tmp_path: Path
) -> None:
    words = flags(
        dataset=f"{functions}arrays",
        dataset_options='{"scale": 2.0, "users": 4}',
        clients=3,
        seed=5,
        data_seed=0,
        rounds=4,
        checkpoint_every=1,
    )
    whole = started(*words, "--out", tmp_path / "whole")
    cut = tmp_path / "cut"
    with pytest.raises(SystemExit):
        run(cli.parse_run([*words, "--out", str(cut)]), StopAfter(2))
    same(started("--resume", cut), whole)


def test_a_run_of_natural_clients(
    functions: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = flags(dataset=f"{functions}arrays", rounds=2, out=tmp_path / "run")
    cli.main(["run", *options, "--dataset-options", '{"users": 2}'])
    told = "".join(capsys.readouterr())
    assert "--partition is natural" in told and "--clients is 2: all that" in told
    assert "natural clients, drawn" not in told
    with h5py.File(tmp_path / "run" / "run.h5") as file:
        assert file["clients/owner"].asstr()[()].tolist() == ["user 0", "user 1"]
        # Of six samples each, one is held out.
        assert file["clients/train_samples"][()].tolist() == [5, 5]
        assert file["clients/test_samples"][()].tolist() == [1, 1]


def test_natural_clients_on_two_ranks(
    functions: str, mpirun: Callable[..., Finished], tmp_path: Path
) -> None:
    words = flags(
        dataset=f"{functions}arrays", rounds=2, precision="fp64", deterministic=True
    )
    alone = started(*words, "--out", tmp_path / "alone")
    both = tmp_path / "both"
    done = mpirun(2, "-m", "hpcfed", "run", *words, "--out", str(both))
    assert done.returncode == 0, done.stderr
    assert_same_run(both, alone, tolerance=1e-12)


def test_data_that_differs_between_ranks_is_one_line(functions: str) -> None:
    config = RunConfig(dataset=f"{functions}unseeded", clients=2, partition="iid")
    first = fingerprint(load_dataset(config, worlds.enter(device="cpu")))

    class OfTwo:
        """The second of two ranks."""

        num_workers = 2

        def role_allgather(self, value: str) -> list[str]:
            return [first, value]

    load_dataset(config, OfTwo())
    loaded.cache_clear()
    with pytest.raises(UserError, match="is not the same on all ranks"):
        load_dataset(config, OfTwo())


def test_a_long_reading_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own_data, "PATIENCE", -1.0)
    reading = own_data._Reading("data set mine: its train set", range(4))
    reading.took(8)
    said = capsys.readouterr().err
    assert said.startswith("hpcfed: data set mine: its train set: 1 items read of 4; ")
    # A stream has no length: what has come is what counts.
    monkeypatch.setattr(own_data.machine, "usable", lambda: 100)
    stream = own_data._Reading("its train set", iter(()))
    stream.took(60)
    with pytest.raises(UserError, match=r"needs 0\.0 GiB, and this machine"):
        stream.took(60)


# Tables


PATIENTS = ["age;sex;site;ill"]
for _number in range(24):
    PATIENTS.append(f"{_number};{'fm'[_number % 2]};s{_number % 3};{'ny'[_number % 2]}")


def table_file(folder: Path, lines: list[str], name: str = "own.csv") -> str:
    path = folder / name
    path.write_text("\n".join(lines), encoding="utf-8-sig")
    return str(path)


def test_a_table_of_words_and_numbers(tmp_path: Path) -> None:
    name = table_file(tmp_path, PATIENTS)
    options = '{"target": "ill"}'
    about = info(name, dataset_options=options)
    # Age, and a column each for f and m; the site is who owns the sample.
    assert (about.task, about.shape, about.classes) == ("classification", (3,), 2)
    assert (about.owners, about.model) == (3, "mlp")
    found = load(name, natural=True, options=options)
    assert found.owner_names is not None
    assert found.owner_names.tolist() == ["s0", "s1", "s2"]
    # Of each owner's eight samples the last is held out.
    owners = found.owners("test")
    assert owners is not None and owners.tolist() == [0, 1, 2]
    assert found.labels("test").tolist() == [1, 0, 1], "words are numbered by letters"
    inputs = inputs_of(found, "train")
    women = inputs[:, 1] > 0
    assert torch.equal(women, found_labels(found) == 0)
    assert torch.equal(inputs[:, 2] > 0, ~women)
    again = load(f"file:{name}", natural=True, options=options)
    assert torch.equal(inputs_of(again, "train"), inputs)


def found_labels(dataset: Dataset) -> torch.Tensor:
    return torch.from_numpy(dataset.labels("train"))


def test_a_table_says_itself_what_is_for_testing(tmp_path: Path) -> None:
    lines = ["x,y,split"]
    for number in range(10):
        lines.append(f"{number},{number / 4},{'test' if number > 6 else 'train'}")
    name = table_file(tmp_path, lines)
    about = info(name)
    assert (about.task, about.samples, about.owners) == ("regression", (7, 3), 0)
    found = load(name)
    assert targets_of(found, "test")[:, 0].tolist() == [1.75, 2.0, 2.25]
    plain = [line.rpartition(",")[0] for line in lines]
    assert info(table_file(tmp_path, plain, "plain.csv")).samples == (9, 1)
    # Whole numbers are classes, unless one says otherwise.
    counts = ["x\ty", *(f"{n}\t{10 * (n % 3)}" for n in range(10))]
    whole = table_file(tmp_path, counts, "whole.tsv")
    assert info(whole).classes == 3
    asked = info(whole, dataset_options='{"task": "regression"}')
    assert (asked.task, asked.classes) == ("regression", 1)
    (told,) = notes(whole, root=None, reading=Reading())
    assert "column y holds whole numbers, so they are 3 classes; --data" in told
    for task in ("classification", "regression"):
        said = Reading(json.dumps({"task": task}))
        assert notes(whole, root=None, reading=said) == ()


TABLE_MISTAKES = [
    ("", "{}", "needs a line of names and two or more of samples"),
    ("a,b\n1,2\n3,4", "{}", "which of the columns a, b is the target"),
    ("a,y\n1,2\n3", "{}", "sample 2 has 1 column, the first line has 2"),
    ("a,y\n1,2\n,4", "{}", "column a is empty in sample 2"),
    ("a,y\n1,2\n5,3\nNA,4", "{}", "column a has numbers, and NA in sample 3"),
    ("a,client,y\n1,x,2\n3,,4", "{}", "column client is empty in sample 2"),
    ("a,a\n1,2\n3,4", "{}", "must give every column a name of its own"),
    (",a\n0,2\n1,4", "{}", "column 1 has none (from pandas, write to_csv(…, index"),
    ("a,y\n1,2\n3,4", '{"target": "b"}', "no column b"),
    ("a,y\n1,2\n3,4", '{"target": null}', "no column None"),
    ("a,y\n1,2\n3,4", '{"drop": null}', "no column None"),
    ("a,y\n1,2\n3,4", '{"drop": 5}', "no column 5"),
    ("a,y\n1,2\n3,4", '{"targets": "y"}', "did you mean 'target'"),
    ("a,y\n1,2\n3,4", '{"drop": "a"}', "no column is left for inputs"),
    ("a,y\n1,2\n3,4", '{"task": "sorting"}', "it may be classification or regression"),
    ("a,y\n1,x\n3,z", '{"task": "regression"}', "holds words"),
    ("a,y,split\n1,2,train\n3,4,dev", "{}", "must say train or test"),
    ("a,y\n1,2\nnan,4\n5,6", "{}", "column a has numbers, and nan in sample 2"),
    ("a,y\n1,2\n3,4\n-inf,6", "{}", "column a has numbers, and -inf in sample 3"),
    ("a,y\n1,2\n3,4\n5,1e400", "{}", "column y has numbers, and 1e400 in sample 3"),
    ("a,y\n1,NaN\n3,4", "{}", "column y has numbers, and NaN in sample 1"),
    ("a,y\n1,sick\n3,sick", "{}", "column y is sick in every sample, which leaves"),
    ("a;y\n1,5;0\n2;1\n3,25;1", "{}", "numbers with a comma, as 1,5; write a point"),
]


@pytest.mark.parametrize(("text", "options", "part"), TABLE_MISTAKES)
def test_tables_that_are_not_sound(
    text: str, options: str, part: str, tmp_path: Path
) -> None:
    name = table_file(tmp_path, [text])
    assert part in refused(name, dataset_options=options)


def test_words_in_a_column_of_numbers_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = table_file(tmp_path, ["a,y", *(f"{n},{n % 2}" for n in range(20)), "V2,1"])
    assert info(name).shape == (21,)
    told = capsys.readouterr().err
    assert "column a counts as words" in told and "V2 in sample 21 beside 20" in told


def test_a_column_of_names_is_no_input(tmp_path: Path) -> None:
    lines = ["name,age,y", *(f"patient {n},{n},{n % 2}" for n in range(200))]
    name = table_file(tmp_path, lines)
    assert 'leave it out as in --dataset-options \'{"drop": ["name"]}\'' in refused(
        name
    )
    assert info(name, dataset_options='{"drop": ["name"]}').shape == (1,)
    assert "no file gone.csv" in refused("gone.csv", data_root=tmp_path)


def test_a_network_that_was_chosen_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = table_file(tmp_path, PATIENTS)
    words = ["run", "--dataset", name, "--dataset-options", '{"target": "ill"}']
    words += ["--rounds", "1", "--device", "cpu", "--out", str(tmp_path / "run")]
    cli.main(words)
    told = capsys.readouterr().err
    assert "--model is mlp: for samples of 3; --model takes others" in told


def test_classes_that_no_sample_has_are_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = save(tmp_path, both_splits({"images": IMAGES, "labels": FROM_ONE}))
    started(
        *("--dataset", name, "--clients", "2", "--partition", "iid", "--seeds", "0,1"),
        *("--rounds", "1", "--device", "cpu", "--model", "mlp"),
        *("--out", tmp_path / "run"),
    )
    assert capsys.readouterr().err.count(NO_ZERO) == 1

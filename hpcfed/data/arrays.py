"""Arrays that users bring: which are required, what they mean, and whether they are
valid.

An .npz file and a user's function hold the same arrays:
- `train_images`, [N, H, W], [N, H, W, C] or [N, C, H, W]; or `train_inputs`, float [N,
  features, …] or tokens, int [N, length].
- `train_labels`, one class per sample; or `train_targets`: classes, next tokens [N,
  length], or float numbers to predict. Tokens without targets predict the next token.
- `train_clients`, optional: the owner of each sample, a number or a name.
- The same for the test set.
- `classes` and `vocabulary`, optional: their sizes, if the samples do not contain all.

Headers, labels, tokens and owners are checked before anything starts, without torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hpcfed.data import Task
from hpcfed.data.array_checks import (
    check_alike,
    check_finite,
    check_held_out,
    check_memory,
    check_next_tokens,
    has_no_test,
    num_classes,
    num_owners,
    one_of,
    same_task,
    sample_shape,
    task_of,
    vocabulary_of,
)
from hpcfed.data.array_source import Source

HELD_OUT = 10
"""Without a test set, every tenth sample of a client is used for testing."""


@dataclass(frozen=True)
class Description:
    """What arrays mean."""

    task: Task
    shape: tuple[int, ...]
    """The shape of one sample, as in `DatasetInfo`."""
    classes: int
    vocabulary: int
    samples: tuple[int, int]
    """Training and test samples, as they are stored."""
    owners: int
    """Clients that own samples; 0: samples have no owners."""
    inputs: str
    """`images` or `inputs`: the suffix of the arrays' names."""
    targets: str
    """`labels` or `targets`; empty: predict the next token."""
    splits: tuple[str, ...]
    """Without `test`, every owner's samples are split."""


def describe(source: Source) -> Description:
    """Return what a user's arrays mean, or say in one line what is wrong with them."""
    inputs = one_of(source, "images", "inputs")
    splits = ("train",) if has_no_test(source) else ("train", "test")
    shapes = [sample_shape(source, f"{split}_{inputs}") for split in splits]
    tokens = inputs == "inputs" and source.header("train_inputs")[1].kind == "i"
    targets = one_of(source, "labels", "targets", optional=tokens)
    task: Task = "next-token"
    if targets:
        tasks = [task_of(source, split, inputs, targets) for split in splits]
        task = same_task(source, tasks, targets)
        check_alike(source, f"{splits[-1]}_{targets}", f"train_{targets}")
    # Before anything is unpacked.
    check_memory(source)
    check_alike(source, f"{splits[-1]}_{inputs}", f"train_{inputs}")
    vocabulary = 0
    if tokens:
        next_tokens = targets if task == "next-token" else ""
        vocabulary = vocabulary_of(source, splits, next_tokens)
    shape = shapes[0]
    if task == "next-token":
        check_next_tokens(source, splits, targets, vocabulary)
        classes = vocabulary
        # Without targets, each token is predicted from those before it.
        shape = shape if targets else (shape[0] - 1,)
    elif task == "regression":
        _, *outputs = source.header(f"train_{targets}")[0]
        classes = outputs[0] if outputs else 1
    else:
        classes = num_classes(source, splits, targets)
    owners = num_owners(source, splits, inputs)
    if len(splits) == 1:
        check_held_out(source)
    sizes = [source.header(f"{split}_{inputs}")[0][0] for split in splits]
    return Description(
        task=task,
        shape=shape,
        classes=classes,
        vocabulary=vocabulary,
        samples=(sizes[0], sizes[1] if len(sizes) > 1 else 0),
        owners=owners,
        inputs=inputs,
        targets=targets,
        splits=splits,
    )


def check_values(source: Source, about: Description) -> None:
    """Refuse numbers that are not finite, or too large to be squared."""
    kinds = [about.inputs]
    if about.targets:
        kinds.append(about.targets)
    for split in about.splits:
        for kind in kinds:
            # Integers need no check of their values, so only the headers of uint8
            # images are read.
            array = f"{split}_{kind}"
            if source.header(array)[1].kind == "f":
                check_finite(source.where, array, source.read(array))


def read_all(source: Source, about: Description) -> dict[str, np.ndarray]:
    """Return `train_inputs`, `train_targets`, and the same for the test set; images are
    [samples, channels, height, width]. If samples have owners, `train_owners` has their
    numbers, and `owner_names` their names.
    """
    found: dict[str, np.ndarray] = {}
    if about.owners:
        owners = source.read("train_clients")
        names, numbers = np.unique(owners, return_inverse=True)
        found["owner_names"] = _texts(names)
        found["train_owners"] = numbers
        if "test_clients" in source.names():
            of_test = np.searchsorted(names, source.read("test_clients"))
            found["test_owners"] = of_test.astype(np.int64)
    for split in about.splits:
        inputs = source.read(f"{split}_{about.inputs}")
        if about.inputs == "images":
            inputs = _channels_first(inputs, about.shape)
        if about.targets:
            targets = source.read(f"{split}_{about.targets}")
        else:
            inputs, targets = inputs[:, :-1], inputs[:, 1:]
        if about.task == "regression":
            targets = targets.reshape(len(targets), -1)
        found[f"{split}_inputs"] = inputs
        found[f"{split}_targets"] = targets
    if "test" not in about.splits:
        found = _without_test(found)
    return found


def held_out(owners: np.ndarray) -> np.ndarray:
    """Tell which samples are for testing if a client has no test set: every tenth of
    each client, whatever the seed; of two to nine samples, the last.
    """
    order = np.argsort(owners, kind="stable")
    _, starts, counts = np.unique(owners[order], return_index=True, return_counts=True)
    size = np.repeat(counts, counts)
    position = np.arange(len(owners)) - np.repeat(starts, counts)
    tenth = position % HELD_OUT == HELD_OUT - 1
    last_of_few = (size > 1) & (size < HELD_OUT) & (position == size - 1)
    chosen = np.zeros(len(owners), dtype=bool)
    chosen[order] = tenth | last_of_few
    return chosen


def with_owned_test(found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Give every client its own test samples if the test set has no owners: samples
    held out of its training set join the test set.
    """
    if "train_owners" not in found or "test_owners" in found:
        return dict(found)
    owners = found["train_owners"]
    test = held_out(owners)
    nobodys = np.full(len(found["test_inputs"]), -1, np.int64)
    split = {
        "owner_names": found["owner_names"],
        "train_owners": owners[~test],
        "test_owners": np.concatenate([nobodys, owners[test]]),
    }
    for kind in ("inputs", "targets"):
        train = found[f"train_{kind}"]
        split[f"train_{kind}"] = train[~test]
        split[f"test_{kind}"] = np.concatenate([found[f"test_{kind}"], train[test]])
    return split


def _without_test(found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Make a test set from samples that are held out of the training set."""
    test = held_out(found["train_owners"])
    split = {"owner_names": found["owner_names"]}
    for kind in ("inputs", "targets", "owners"):
        values = found[f"train_{kind}"]
        split[f"train_{kind}"] = values[~test]
        split[f"test_{kind}"] = values[test]
    return split


def _texts(names: np.ndarray) -> np.ndarray:
    """Return names as texts that a record can store."""
    texts = []
    for name in names.tolist():
        text = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
        # HDF5 stores neither null characters nor lone surrogates.
        plain = text.replace("\0", "").encode("utf-8", "replace")
        texts.append(plain.decode())
    return np.array(texts)


def _channels_first(images: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if images.ndim == 3:
        return images[:, None]
    return images if images.shape[1:] == shape else images.transpose(0, 3, 1, 2)

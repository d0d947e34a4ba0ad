"""What a user's arrays mean, and what can be wrong with them: one line per mistake."""

import math
from collections.abc import Sequence

import numpy as np

from hpcfed.data import Task
from hpcfed.data.arrays import KNOWN, Description, Header, Source
from hpcfed.data.owners import num_owners
from hpcfed.runtime import machine

NO_TARGET = -100
"""Marks positions that no token follows; torch's losses ignore it, too."""


def describe(source: Source) -> Description:
    """Return what a user's arrays mean, or say in one line what is wrong with them."""
    inputs = _one_of(source, "images", "inputs")
    splits = ("train",) if _has_no_test(source) else ("train", "test")
    shapes = [_sample_shape(source, f"{split}_{inputs}") for split in splits]
    # Integer inputs are tokens; integer images are pixels.
    tokens = inputs == "inputs" and source.header("train_inputs")[1].kind == "i"
    targets = _one_of(source, "labels", "targets", optional=tokens)
    task: Task = "next-token"
    if targets:
        tasks = [_task_of(source, split, inputs, targets) for split in splits]
        if len(set(tasks)) > 1:
            raise source.wrong(
                f"train_{targets} is for {tasks[0]}, test_{targets} for {tasks[1]}; "
                "give both the same shape and type"
            )
        task = tasks[0]
        _check_alike(source, f"{splits[-1]}_{targets}", f"train_{targets}")
    # Before anything is unpacked.
    _check_memory(source)
    _check_alike(source, f"{splits[-1]}_{inputs}", f"train_{inputs}")
    vocabulary = 0
    if tokens:
        next_tokens = targets if task == "next-token" else ""
        vocabulary = _vocabulary_of(source, splits, next_tokens)
    shape = shapes[0]
    if task == "next-token":
        _check_next_tokens(source, splits, targets, vocabulary)
        classes = vocabulary
        # Without targets, each token is predicted from those before it.
        shape = shape if targets else (shape[0] - 1,)
    elif task == "regression":
        _, *outputs = source.header(f"train_{targets}")[0]
        classes = outputs[0] if outputs else 1
    else:
        classes = _num_classes(source, splits, targets)
    owners = num_owners(source, splits, inputs)
    if len(splits) == 1:
        _check_held_out(source)
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


def _header(source: Source, array: str) -> Header:
    """Return shape and type of an array, which must exist."""
    if array not in source.names():
        raise source.wrong(
            f"no array {array}; {source.whole} must hold train_inputs (or "
            "train_images), train_labels (or train_targets) and the same for test, "
            "which may be left out beside train_clients"
        )
    return source.header(array)


def _one_of(source: Source, first: str, second: str, *, optional: bool = False) -> str:
    """Return which of two suffixes the arrays' names have; empty if that is allowed."""
    names = source.names()
    if f"train_{first}" in names and f"train_{second}" in names:
        raise source.wrong(
            f"train_{first} and train_{second} mean the same; keep one of them"
        )
    if f"train_{second}" in names:
        return second
    if optional and f"train_{first}" not in names:
        return ""
    return first


def _has_no_test(source: Source) -> bool:
    """Tell whether the test set must be split off, which requires owners."""
    names = source.names()
    # Any test array counts: half a test set is a mistake, which is reported later.
    has_test = any(name.startswith("test_") for name in names if name in KNOWN)
    return "train_clients" in names and not has_test


def _sample_shape(source: Source, array: str) -> tuple[int, ...]:
    """Return the shape of one sample."""
    shape, dtype = _header(source, array)
    if array.endswith("images"):
        return _image_shape(source, array, shape, dtype)
    if dtype not in (np.float32, np.float64, np.int32, np.int64):
        raise source.wrong(
            f"{array} is {dtype}; give float32 or float64 numbers, int32 or int64 "
            "tokens, or images as train_images"
        )
    if dtype.kind == "i" and len(shape) != 2:
        raise source.wrong(
            f"{array} of integers are tokens, [N, length], not {list(shape)}; numbers "
            "are float32 or float64"
        )
    if len(shape) < 2:
        raise source.wrong(
            f"{array} has shape {list(shape)}; it must be [N, features] or have more "
            "axes"
        )
    if math.prod(shape) == 0:
        raise source.wrong(f"{array} is empty; give at least one sample")
    return shape[1:]


def _image_shape(
    source: Source, array: str, shape: tuple[int, ...], dtype: np.dtype
) -> tuple[int, int, int]:
    """Return channels, height and width of the images.

    They may be [N, H, W], [N, H, W, C] or [N, C, H, W] with C = 1 or 3.
    """
    if dtype not in (np.uint8, np.float32, np.float64):
        raise source.wrong(
            f"{array} is {dtype}; images must be uint8, float32 or float64"
        )
    if math.prod(shape) == 0:
        raise source.wrong(f"{array} is empty; give at least one image")
    match shape:
        case (_, height, width):
            return (1, height, width)
        # Either axis could be the channels: a guess might train on nonsense.
        case (_, 1 | 3, _, 1 | 3):
            raise source.wrong(
                f"{array} of shape {list(shape)} may be [N, C, H, W] or [N, H, W, C]; "
                "pad the images"
            )
        case (_, 1 | 3 as channels, height, width):
            return (channels, height, width)
        case (_, height, width, 1 | 3 as channels):
            return (channels, height, width)
    raise source.wrong(
        f"{array} has shape {list(shape)}; it must be [N, H, W], [N, H, W, C] or [N, "
        "C, H, W] with 1 or 3 channels"
    )


def _check_memory(source: Source) -> None:
    """Refuse arrays that unpack to more than the machine's memory.

    A few bytes of a zip file may unpack to a huge array.
    """
    needed = 0
    for array in source.names():
        if array in KNOWN:
            shape, dtype = source.header(array)
            needed += math.prod(shape) * dtype.itemsize
    usable = machine.usable()
    if needed > usable:
        raise source.wrong(
            f"its arrays have {needed / 2**30:,.0f} GiB, this machine has "
            f"{usable / 2**30:,.0f}"
        )


def _check_alike(source: Source, array: str, first: str) -> None:
    """Refuse a test array whose samples are not of the training set's shape or kind."""
    shape, dtype = source.header(array)
    first_shape, first_dtype = source.header(first)
    # Stored shapes, not image shapes: both splits must have the same order of axes.
    if shape[1:] != first_shape[1:]:
        raise source.wrong(
            f"{array} are {_shown(source, array)}, {first} are "
            f"{_shown(source, first)}; give both the same shape"
        )
    # Bytes and float32 may be mixed for pixels, but numbers and tokens may not.
    if {dtype.kind, first_dtype.kind} == {"f", "i"}:
        raise source.wrong(
            f"{array} is {dtype}, {first} is {first_dtype}; give both the same type"
        )


def _shown(source: Source, array: str) -> tuple[int, ...]:
    """Return the shape of a sample as the user knows it."""
    if array.endswith("images"):
        return _sample_shape(source, array)
    return source.header(array)[0][1:]


def _check_held_out(source: Source) -> None:
    """Refuse owners if none has a sample to spare for a test set."""
    _, samples = np.unique(source.read("train_clients"), return_counts=True)
    if samples.max() < 2:
        raise source.wrong(
            "no client has two samples, one of them for testing; give a test set"
        )


def _task_of(source: Source, split: str, inputs: str, targets: str) -> Task:
    """Return the task that the targets of a split imply."""
    array = f"{split}_{targets}"
    shape, dtype = _header(source, array)
    input_shape, input_dtype = source.header(f"{split}_{inputs}")
    samples = input_shape[0]
    if dtype.kind in "USb":
        raise source.wrong(
            f"{array} is {dtype}; classes must be integers 0, 1, 2, …, as by "
            "numpy.unique(labels, return_inverse=True)[1] over training and test labels"
        )
    if targets == "labels" and dtype.kind not in "iu":
        raise source.wrong(
            f"{array} is {dtype}; labels must be integers 0, 1, 2, …; numbers to "
            f"predict are {array.replace('labels', 'targets')}"
        )
    if dtype.kind not in "iu" and dtype not in (np.float32, np.float64):
        raise source.wrong(
            f"{array} is {dtype}; give integers, which are classes or tokens, or "
            "float32 or float64 numbers to predict"
        )
    if dtype.kind == "f":
        _check_rows(source, array, samples, wanted=(1, 2))
        return "regression"
    of_tokens = inputs == "inputs" and input_dtype.kind == "i"
    if of_tokens and shape == input_shape and len(shape) == 2:
        return "next-token"
    _check_rows(source, array, samples, wanted=(1,))
    return "classification"


def _check_rows(
    source: Source, array: str, samples: int, *, wanted: tuple[int, ...]
) -> None:
    """Refuse targets whose number differs from the samples', or with too many axes."""
    shape, _ = source.header(array)
    what, whose = "targets", "sample"
    if array.endswith("labels"):
        what, whose = "labels", "image"
    if len(shape) not in wanted or 0 in shape[1:]:
        raise source.wrong(
            f"{array} has shape {list(shape)}; it must be one row of {samples} {what}"
        )
    if shape[0] != samples:
        raise source.wrong(
            f"{array} has {shape[0]} {what} for {samples} {whose}s; give each {whose} "
            f"one {what.removesuffix('s')}"
        )


def _num_classes(source: Source, splits: Sequence[str], targets: str) -> int:
    """Return the number of classes: as given, or from the largest training label."""
    found = {
        f"{split}_{targets}": source.read(f"{split}_{targets}") for split in splits
    }
    for array, labels in found.items():
        if int(labels.min()) < 0:
            raise source.wrong(
                f"{array} holds {int(labels.min())}; number the classes 0, 1, 2, …"
            )
    train = found[f"train_{targets}"]
    classes = _given(source, "classes") or int(train.max()) + 1
    if classes == 1:
        raise source.wrong(
            f"train_{targets} has one class, 0, so every answer is right; number the "
            "classes 0, 1, 2, …"
        )
    # A model has an output per class: a label that is really an identifier must not
    # lead to a billion outputs.
    if "classes" not in source.names() and classes > len(train):
        raise source.wrong(
            f"train_{targets} holds {classes - 1} among only {len(train)} samples; "
            "number the classes 0, 1, 2, …"
        )
    for array, labels in found.items():
        if int(labels.max()) >= classes:
            had = f"train_{targets} only 0 to {classes - 1}"
            if "classes" in source.names():
                had = f"and classes is {classes}"
            raise source.wrong(f"{array} holds {int(labels.max())}, {had}")
    return classes


def _vocabulary_of(source: Source, splits: Sequence[str], next_tokens: str) -> int:
    """Return the number of tokens: as given, or one more than the largest for training.
    `next_tokens` is the suffix of the tokens to predict, if they are given.
    """
    given = _given(source, "vocabulary")
    tokens = source.read("train_inputs")
    # From the training set alone: a network cannot learn tokens that only the test set
    # has.
    vocabulary = given or int(tokens.max()) + 1
    if next_tokens and not given:
        vocabulary = max(vocabulary, int(source.read(f"train_{next_tokens}").max()) + 1)
    # A network has a row per token: a hash or an identifier must not be taken for one.
    if not given and vocabulary > tokens.size:
        raise source.wrong(
            f"train_inputs holds token {vocabulary - 1} among only {tokens.size} "
            f"tokens; number them 0, 1, 2, …, or give `vocabulary`{source.sized_by}"
        )
    for split in splits:
        _check_tokens(source, f"{split}_inputs", vocabulary)
    return vocabulary


def _check_next_tokens(
    source: Source, splits: Sequence[str], targets: str, vocabulary: int
) -> None:
    """Refuse tokens to predict that do not exist, and samples of a single token."""
    if not targets and source.header("train_inputs")[0][1] < 2:
        raise source.wrong(
            "samples of train_inputs have one token, so there is no next token to "
            "predict; give two or more, or train_targets"
        )
    for split in splits:
        if targets:
            _check_tokens(source, f"{split}_{targets}", vocabulary, least=NO_TARGET)


def _check_tokens(
    source: Source, array: str, vocabulary: int, *, least: int = 0
) -> None:
    tokens = source.tokens(array)
    none = ""
    if least == NO_TARGET:
        tokens = tokens[tokens != NO_TARGET]
        none = f"; {NO_TARGET} stands where there is none"
    if not tokens.size:
        raise source.wrong(f"{array} holds no token")
    if int(tokens.min()) < 0:
        raise source.wrong(
            f"{array} holds {int(tokens.min())}; tokens are 0, 1, 2, …{none}"
        )
    if int(tokens.max()) >= vocabulary:
        helps = f"give `vocabulary`{source.sized_by}, the number of all tokens"
        if "vocabulary" in source.names():
            helps = "give a larger `vocabulary`"
        raise source.wrong(
            f"{array} holds token {int(tokens.max())}, the vocabulary is 0 to "
            f"{vocabulary - 1}; {helps}"
        )


def _given(source: Source, array: str) -> int:
    """Return a number that the user gives as a scalar array; 0: not given."""
    if array not in source.names():
        return 0
    shape, dtype = source.header(array)
    if shape not in ((), (1,)) or dtype.kind not in "iu":
        raise source.wrong(f"{array} must be one whole number")
    number = int(source.read(array).reshape(-1)[0])
    if not 1 <= number <= 2**31:
        raise source.wrong(f"{array} is {number}; it must be 1 or more")
    return number

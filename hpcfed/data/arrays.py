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

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcfed.data import Task
from hpcfed.data.tokeniser import Language
from hpcfed.errors import UserError
from hpcfed.runtime import machine

NAMES = ("train_images", "train_labels", "test_images", "test_labels")
"""The arrays of labelled images, as messages name them."""
KNOWN = (
    *("train_images", "train_inputs", "test_images", "test_inputs"),
    *("train_labels", "train_targets", "test_labels", "test_targets"),
    *("train_clients", "test_clients", "classes", "vocabulary"),
)
"""All arrays that have a meaning; others are ignored."""
Header = tuple[tuple[int, ...], np.dtype]
"""Shape and type of an array."""
LARGEST_VALUE = 1e15
"""The largest value of an input: its squares are summed in float32."""
HELD_OUT = 10
"""Without a test set, every tenth sample of a client is used for testing."""


class Source:
    """Where arrays come from."""

    where: str
    """The file or function, for messages."""
    whole: str
    """What holds the arrays, for messages: `the file`."""
    sized_by: str = ""
    """How `classes` and `vocabulary` are given if not as arrays, for messages."""
    notes: tuple[str, ...] = ()
    """What was cut, left out or chosen, for the run's first lines."""
    apart: bool = False
    """Whether inputs may hold ~t for a token t that begins another text of a row."""

    def names(self) -> Collection[str]:
        """Return the names of all arrays."""
        raise NotImplementedError

    def header(self, array: str) -> Header:
        """Return shape and type of an array, without reading it if possible."""
        raise NotImplementedError

    def read(self, array: str) -> np.ndarray:
        raise NotImplementedError

    def tokens(self, array: str) -> np.ndarray:
        """Return an array of tokens, without marks of where a text begins."""
        found = self.read(array)
        marked = self.apart and array.endswith("_inputs")
        return np.maximum(found, ~found) if marked else found

    def wrong(self, what: str) -> UserError:
        """Return the one line that says what is wrong with these arrays."""
        return UserError(f"{self.where}: {what}")


@dataclass(frozen=True)
class InMemory(Source):
    """Arrays that are already in memory."""

    where: str
    arrays: Mapping[str, np.ndarray]
    whole: str = "the dict"
    notes: tuple[str, ...] = ()
    language: Language | None = None
    """What tokens mean, if they are a text's."""
    apart: bool = False
    sized_by: str = ""

    def names(self) -> Collection[str]:
        return self.arrays.keys()

    def header(self, array: str) -> Header:
        found = self.arrays[array]
        return found.shape, found.dtype

    def read(self, array: str) -> np.ndarray:
        return self.arrays[array]


def read_text(path: Path, *, memory: int, instead: str = "") -> str:
    """Return the text of a user's file; refuse one that would take more than the host's
    memory, at `memory` bytes for each of its own. `instead` ends that line.
    """
    size = path.stat().st_size
    if memory * size > machine.usable():
        raise UserError(
            f"{path}: {size / 2**30:,.1f} GiB of text take more than this machine's "
            f"memory to read{instead}"
        )
    try:
        # Excel puts a byte order mark first, which would become part of a name.
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8; convert it") from None


def version(path: Path) -> tuple[int, ...]:
    """Return what changes if a file is written again, as a notebook may do between two
    runs: a part of caches' keys.
    """
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def find(name: str, example: str, *, root: Path | None, wanted: str) -> Path:
    """Return the file of `PREFIX:PATH`: as given, or else below the root, the folder of
    all data. `example` is such a name, and `wanted` says what it should be.
    """
    prefix = example.partition(":")[0] + ":"
    folder = not Path(example).suffix
    given = name.removeprefix(prefix)
    if not given:
        what = "folder" if folder else "path"
        raise UserError(f"{prefix} needs a {what} after the colon, e.g. {example}")
    path = Path(given).expanduser()
    # The path as given comes first, because a shell completes it that way.
    places = [path]
    if root is not None and not path.is_absolute():
        places.append(root / path)
    for place in places:
        if place.is_dir() if folder else place.is_file():
            return place
    what = "folder" if folder else "file"
    shown = " or ".join(map(str, places))
    raise UserError(f"{name}: no {what} {shown}; give {wanted}")


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


def check_values(source: Source, about: Description) -> None:
    """Refuse numbers that are not finite, or too large to be squared."""
    for split in about.splits:
        for kind in filter(None, (about.inputs, about.targets)):
            # Integers need no check of their values, so only the headers of uint8
            # images are read.
            array = f"{split}_{kind}"
            if source.header(array)[1].kind == "f":
                _check_finite(source, array, source.read(array))


def _check_finite(source: Source, array: str, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise source.wrong(
            f"{array} holds NaN or infinite values; remove or replace them"
        )
    if np.abs(values).max() > LARGEST_VALUE:
        raise source.wrong(
            f"{array} holds values beyond {LARGEST_VALUE:g}; scale them down"
        )


def remarks(source: Source, about: Description) -> Iterator[str]:
    """Say what was taken for channels and classes, where the user may have meant
    something else.
    """
    few = range(1, 5)
    if about.inputs == "inputs" and len(about.shape) == 3:
        channels, *_, last = about.shape
        if last in few and channels not in few:
            yield (
                f"{source.where}: samples {list(about.shape)} have {channels} channels: "
                f"the first axis; give images of {last} as train_images, or as "
                f"[{last}, {channels}, {about.shape[1]}]"
            )
    if about.task != "classification":
        return
    array = f"train_{about.targets}"
    if (about.inputs, about.targets) == ("inputs", "targets"):
        yield (
            f"{source.where}: {array} are whole numbers, so they are "
            f"{about.classes:,} classes; as floats they are numbers to predict"
        )
    # A number of classes that is given counts those that no sample has.
    if "classes" in source.names():
        return
    labels = [source.read(f"{split}_{about.targets}") for split in about.splits]
    empty = np.setdiff1d(np.arange(about.classes), np.concatenate(labels))
    if len(empty):
        more = f" and {len(empty) - 1:,} more" if len(empty) > 1 else ""
        yield (
            f"{source.where}: {array} go up to {about.classes - 1}, which makes "
            f"{about.classes:,} classes, but no sample has {empty[0]}{more}; number them "
            f"0, 1, 2, …, or give `classes`{source.sized_by}"
        )


def read_all(source: Source, about: Description) -> dict[str, np.ndarray]:
    """Return `train_inputs`, `train_targets`, and the same for the test set; images are
    [samples, channels, height, width]. If samples have owners, `train_owners` has their
    numbers, and `owner_names` their names.
    """
    found: dict[str, np.ndarray] = {}
    if about.owners:
        owners = source.read("train_clients")
        # Sorted, so that a client's number does not depend on the order of samples.
        names, numbers = np.unique(owners, return_inverse=True)
        found["owner_names"] = _texts(names)
        found["train_owners"] = numbers
        if "test_clients" in source.names():
            # Each is among the names: `describe` refuses owners without training
            # samples.
            of_test = np.searchsorted(names, source.read("test_clients"))
            found["test_owners"] = of_test.astype(np.int64)
    for split in about.splits:
        inputs = source.read(f"{split}_{about.inputs}")
        if about.inputs == "images":
            inputs = _channels_first(inputs, about.shape)
        if about.targets:
            targets = source.read(f"{split}_{about.targets}")
        else:
            # Each token's target is the next one, so both are one token shorter.
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
    # A sample's number among its owner's samples, in the data set's order.
    position = np.arange(len(owners)) - np.repeat(starts, counts)
    tenth = position % HELD_OUT == HELD_OUT - 1
    last_of_few = (size > 1) & (size < HELD_OUT) & (position == size - 1)
    chosen = np.zeros(len(owners), dtype=bool)
    # Back from the owners' order to that of the data set.
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
    # The given test set stays: the global model is judged on it, but it has no owners.
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

"""Data sets: each is read from small files in its own format, which the tests write
themselves.
"""

import gzip
import hashlib
import io
import os
import pickle
import subprocess
import sys
import threading
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcfed.data import DATASETS, PARTITIONS, files, loading
from hpcfed.data.arrays import NAMES
from hpcfed.data.datasets import (
    SPLITS,
    ArrayDataset,
    Dataset,
    Split,
    SyntheticDataset,
    SyntheticSize,
    channel_moments,
)
from hpcfed.errors import UserError

CPU = torch.device("cpu")
SIZE = SyntheticSize(shape=(3, 32, 32), classes=10, train=1500, test=400)
IDX_SETS = {
    "mnist": ("MNIST", "train", "t10k"),
    "fashion-mnist": ("FashionMNIST", "train", "t10k"),
    "emnist": ("EMNIST", "emnist-byclass-train", "emnist-byclass-test"),
}


def load(
    name: str, root: Path | None = None, *, download: bool = False, seed: int = 0
) -> Dataset:
    return loading.load(name, root=root, download=download, seed=seed, synthetic=SIZE)


def all_images(dataset: Dataset, split: Split) -> torch.Tensor:
    return dataset.inputs(
        split, np.arange(len(dataset.labels(split))), device=CPU, dtype=torch.float64
    )


def expected_images(train: np.ndarray, images: np.ndarray) -> torch.Tensor:
    """The definition: scaled to 0…1, then standardised by each channel of the training
    images [N, C, H, W].
    """
    mean, std = (
        (train / 255).mean(axis=(0, 2, 3), keepdims=True),
        (train / 255).std(axis=(0, 2, 3), keepdims=True),
    )
    return torch.from_numpy((images / 255 - mean) / std)


def assert_holds(dataset: Dataset, arrays: dict[str, np.ndarray]) -> None:
    for split in SPLITS:
        expected = expected_images(arrays["train_images"], arrays[f"{split}_images"])
        torch.testing.assert_close(
            all_images(dataset, split), expected, rtol=1e-9, atol=1e-9
        )
        labels = dataset.labels(split)
        assert labels.dtype == np.int64
        assert labels.tolist() == arrays[f"{split}_labels"].tolist()


def random_arrays(
    shape: tuple[int, ...], classes: int, *, train: int = 12, test: int = 5
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {}
    for split, samples in (("train", train), ("test", test)):
        arrays[f"{split}_images"] = rng.integers(
            0, 256, (samples, *shape), dtype=np.uint8
        )
        arrays[f"{split}_labels"] = np.arange(samples) % classes
    return arrays


def refused(name: str, root: Path | None = None, *, download: bool = False) -> str:
    """The one line with which the data is refused when it is loaded."""
    with pytest.raises(UserError) as caught:
        load(name, root, download=download)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


# The catalogue and its rules


def test_catalogue_needs_no_torch() -> None:
    code = (
        "import sys, hpcfed.data.files; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'torchvision', 'sklearn', 'scipy')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_info_of_the_catalogue() -> None:
    for name, about in DATASETS.items():
        assert (
            files.info(
                name, root=None, synthetic_shape=(3, 32, 32), synthetic_classes=10
            )
            == about
        )
    small = files.info(
        "synthetic", root=None, synthetic_shape=(1, 28, 28), synthetic_classes=4
    )
    assert (small.shape, small.classes, small.model) == ((1, 28, 28), 4, "cnn-fmnist")
    assert all(
        "\n" not in line
        for line in (
            *PARTITIONS.values(),
            *(about.summary for about in DATASETS.values()),
        )
    )


def test_names_that_are_not_known() -> None:
    assert refused("cifr10").endswith("did you mean 'cifar10'?")
    assert "file:PATH.npz" in refused("xyz")
    with pytest.raises(UserError, match="did you mean 'mnist'"):
        files.info("mnst", root=None, synthetic_shape=(3, 32, 32), synthetic_classes=10)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("cifar10", "cifar-10-batches-py"),
        ("cifar100", "cifar-100-python"),
        ("svhn", "train_32x32.mat"),
        ("mnist", "train-images-idx3-ubyte"),
        ("emnist", "emnist-byclass-train-images-idx3-ubyte"),
    ],
)
def test_missing_files_are_named(name: str, missing: str, tmp_path: Path) -> None:
    line = refused(name, tmp_path)
    for part in (
        name,
        missing,
        str(tmp_path),
        "--data-root",
        "HPCFED_DATA",
        "--download",
    ):
        assert part in line
    assert "--data-root" in refused(name)
    assert missing in refused(name, tmp_path / "nowhere")
    files.require(name, root=tmp_path, download=True)


def test_a_single_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-python").mkdir()
    (tmp_path / "cifar-100-python" / "train").touch()
    assert "cifar-100-python/test in" in refused("cifar100", tmp_path)


# Digits


def test_digits_are_stratified_and_standardised() -> None:
    digits = load("digits")
    train, test = (np.bincount(digits.labels(split)) for split in SPLITS)
    assert (train.sum(), test.sum()) == DATASETS["digits"].samples
    np.testing.assert_allclose(test / (train + test), 0.2, atol=0.01)
    images = all_images(digits, "train")
    assert images.shape[1:] == digits.shape == (1, 8, 8)
    assert abs(images.mean()) < 1e-9
    assert abs(images.std(correction=0) - 1) < 1e-9
    assert torch.equal(images, all_images(load("digits", seed=7), "train"))
    assert not {row.tobytes() for row in images.numpy()} & {
        row.tobytes() for row in all_images(digits, "test").numpy()
    }


def test_any_subset_in_any_order() -> None:
    digits = load("digits")
    index = np.array([5, 3, 3, 900])
    some = digits.inputs("train", index, device=CPU, dtype=torch.float64)
    assert torch.equal(some, all_images(digits, "train")[index])
    assert digits.inputs("test", index[:0], device=CPU, dtype=torch.float32).shape == (
        0,
        1,
        8,
        8,
    )


@pytest.mark.parametrize("value", [0, 7, 0.1, -1e6])
def test_a_constant_channel_is_not_blown_up(value: float) -> None:
    images = np.random.default_rng(0).normal(3, 2, (50, 2, 3, 3))
    images[:, 1] = value
    mean, std = channel_moments(images, block=7)
    np.testing.assert_allclose(
        [mean[0], std[0]], [images[:, 0].mean(), images[:, 0].std()]
    )
    np.testing.assert_allclose([mean[1], std[1]], [value, 1])


# MNIST and the like


def write_idx(path: Path, array: np.ndarray, *, gz: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = bytes([0, 0, 8, array.ndim]) + b"".join(
        side.to_bytes(4, "big") for side in array.shape
    )
    data += array.astype(np.uint8).tobytes()
    if gz:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(data, 1))
    else:
        path.write_bytes(data)


def write_idx_set(
    name: str, folder: Path, *, gz: bool = False
) -> dict[str, np.ndarray]:
    arrays = random_arrays((28, 28), DATASETS[name].classes)
    for split, prefix in zip(SPLITS, IDX_SETS[name][1:], strict=True):
        write_idx(
            folder / f"{prefix}-images-idx3-ubyte", arrays[f"{split}_images"], gz=gz
        )
        write_idx(
            folder / f"{prefix}-labels-idx1-ubyte", arrays[f"{split}_labels"], gz=gz
        )
    if name == "emnist":
        arrays |= {
            array: arrays[array].swapaxes(1, 2)
            for array in ("train_images", "test_images")
        }
    return arrays | {
        array: arrays[array][:, None] for array in ("train_images", "test_images")
    }


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    write_idx_set("mnist", tmp_path / "MNIST" / "raw")
    return tmp_path


@pytest.mark.parametrize("name", IDX_SETS)
@pytest.mark.parametrize("gz", [False, True])
def test_idx_sets(name: str, gz: bool, tmp_path: Path) -> None:
    arrays = write_idx_set(name, tmp_path / IDX_SETS[name][0] / "raw", gz=gz)
    files.require(name, root=tmp_path, download=False)
    dataset = load(name, tmp_path)
    assert (dataset.name, dataset.shape, dataset.classes) == (
        name,
        DATASETS[name].shape,
        DATASETS[name].classes,
    )
    assert_holds(dataset, arrays)


def test_emnist_agrees_with_what_torchvision_reads(tmp_path: Path) -> None:
    write_idx_set("emnist", tmp_path / "EMNIST" / "raw")
    theirs = torchvision.datasets.EMNIST(tmp_path, split="byclass", train=False)
    upright = theirs.data.numpy().transpose(0, 2, 1)[
        :, None
    ]  # torchvision leaves the images lying on their side
    ours = all_images(load("emnist", tmp_path), "test")
    order = np.argsort(upright[0].ravel(), kind="stable")
    assert (torch.diff(ours[0].flatten()[order.tolist()]) >= 0).all()


@pytest.mark.parametrize("root", [True, False])
def test_fashion_mnist_of_debian_is_found_by_itself(
    root: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "DEBIAN_FASHION_MNIST", tmp_path / "debian")
    arrays = write_idx_set("fashion-mnist", tmp_path / "debian", gz=True)
    assert_holds(load("fashion-mnist", tmp_path if root else None), arrays)
    with pytest.raises(UserError):
        files.require("mnist", root=tmp_path, download=False)


def test_the_root_comes_before_debian(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "DEBIAN_FASHION_MNIST", tmp_path / "debian")
    write_idx_set("fashion-mnist", tmp_path / "debian", gz=True)
    write_idx_set("fashion-mnist", tmp_path / "FashionMNIST" / "raw")
    found = files.idx_files("fashion-mnist", root=tmp_path)
    assert found is not None
    assert {path.parent.name for path in found.values()} == {"raw"}


@pytest.mark.parametrize(
    "damage", [b"", b"\0\0\x0d\x03", b"\0\0\x08\x03\0\0\0\x05\0\0\0\x1c\0\0\0\x1cabc"]
)
def test_damaged_idx_files(damage: bytes, mnist: Path) -> None:
    path = mnist / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    path.write_bytes(damage)
    assert str(path) in refused("mnist", mnist)


def test_damaged_gzip(tmp_path: Path) -> None:
    write_idx_set("mnist", tmp_path / "MNIST" / "raw", gz=True)
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-500])
    assert str(path) in refused("mnist", tmp_path)


@pytest.mark.parametrize(
    ("file", "array"),
    [
        ("train-labels-idx1-ubyte", np.arange(11)),
        ("train-labels-idx1-ubyte", np.full(12, 10)),
        ("train-images-idx3-ubyte", np.zeros((12, 28, 27))),
    ],
)
def test_idx_files_of_something_else(file: str, array: np.ndarray, mnist: Path) -> None:
    write_idx(mnist / "MNIST" / "raw" / file, array)
    assert "not those of mnist" in refused("mnist", mnist)


def test_pickled_form_of_old_torchvision_is_never_loaded(
    mnist: Path, tmp_path: Path
) -> None:
    processed = mnist / "MNIST" / "processed"
    processed.mkdir()
    for file in ("training.pt", "test.pt"):
        torch.save(Bomb(tmp_path / "exploded"), processed / file)
    load("mnist", mnist)
    (mnist / "MNIST" / "raw" / "train-images-idx3-ubyte").unlink()
    assert "move it away" in refused("mnist", mnist, download=True)
    assert not (tmp_path / "exploded").exists()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address under which a web server on this machine offers a folder."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = write_idx_set("mnist", tmp_path / "server", gz=True)
    resources = [(path.name, md5(path)) for path in (tmp_path / "server").iterdir()]
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", resources)
    monkeypatch.setenv("no_proxy", "*")
    with served(tmp_path / "server") as address:
        monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [address])
        assert_holds(load("mnist", tmp_path / "new", download=True), arrays)
        monkeypatch.setattr(
            torchvision.datasets.MNIST, "mirrors", [f"{address}nothing/"]
        )
        assert "download into" in refused("mnist", tmp_path / "other", download=True)


# CIFAR and SVHN


def write_cifar(
    root: Path, monkeypatch: pytest.MonkeyPatch, *, fine: bool
) -> dict[str, np.ndarray]:
    kind = torchvision.datasets.CIFAR100 if fine else torchvision.datasets.CIFAR10
    arrays = random_arrays((3, 32, 32), 100 if fine else 10, train=20)
    folder = root / kind.base_folder
    folder.mkdir()
    labels = "fine_labels" if fine else "labels"
    for split, table in (("train", kind.train_list), ("test", kind.test_list)):
        names = [name for name, _ in table]
        images, targets = (
            np.array_split(arrays[f"{split}_{part}"], len(names))
            for part in ("images", "labels")
        )
        for name, x, y in zip(names, images, targets, strict=True):
            batch = {"data": x.reshape(len(x), -1), labels: y.tolist()}
            content = pickle.dumps(batch, protocol=3)
            # The originals have Python 2's text, T, where Python 3 writes Unicode, X.
            for key in batch:
                word = len(key).to_bytes(4, "little") + key.encode()
                content = content.replace(b"X" + word, b"T" + word)
            (folder / name).write_bytes(content)
        sums = {name: md5(folder / name) for name in names}
        monkeypatch.setattr(
            kind, f"{split}_list", [list(pair) for pair in sums.items()]
        )
        own = loading.CIFAR_CHECKSUMS["cifar100" if fine else "cifar10"]
        monkeypatch.setitem(own, split, sums)
    meta = folder / kind.meta["filename"]
    meta.write_bytes(pickle.dumps({kind.meta["key"]: []}))
    monkeypatch.setattr(kind, "meta", kind.meta | {"md5": md5(meta)})
    return arrays


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = write_cifar(tmp_path, monkeypatch, fine=name == "cifar100")
    dataset = load(name, tmp_path)
    assert (dataset.shape, dataset.classes) == (
        DATASETS[name].shape,
        DATASETS[name].classes,
    )
    assert_holds(dataset, arrays)
    assert_holds(load(name, tmp_path, download=True), arrays)


def test_cifar_with_a_wrong_checksum_is_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar(tmp_path, monkeypatch, fine=False)
    batch = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    batch.write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    assert "checksums differ" in refused("cifar10", tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_cifar_unpickles_nothing_but_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even from a file with the right checksum."""
    write_cifar(tmp_path, monkeypatch, fine=True)
    file = tmp_path / "cifar-100-python" / "train"
    file.write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    monkeypatch.setitem(
        loading.CIFAR_CHECKSUMS["cifar100"], "train", {"train": md5(file)}
    )
    assert "is not an array" in refused("cifar100", tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_the_checksums_of_cifar_are_those_of_torchvision() -> None:
    kinds = {"cifar10": "CIFAR10", "cifar100": "CIFAR100"}
    for name, own in loading.CIFAR_CHECKSUMS.items():
        kind = getattr(torchvision.datasets, kinds[name])
        assert list(own["train"].items()) == [tuple(pair) for pair in kind.train_list]
        assert list(own["test"].items()) == [tuple(pair) for pair in kind.test_list]


def write_svhn(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    arrays = random_arrays((3, 32, 32), 10)
    table = {}
    for split in SPLITS:
        path = root / f"{split}_32x32.mat"
        labels = arrays[f"{split}_labels"]
        images = arrays[f"{split}_images"].transpose(2, 3, 1, 0)
        scipy.io.savemat(
            path,
            {
                "X": images,
                "y": np.where(labels == 0, 10, labels)[:, None].astype(np.uint8),
            },
        )
        table[split] = [path.as_uri(), path.name, md5(path)]
    monkeypatch.setattr(torchvision.datasets.SVHN, "split_list", table)
    return arrays


def test_svhn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = write_svhn(tmp_path, monkeypatch)
    assert_holds(load("svhn", tmp_path), arrays)
    with (tmp_path / "test_32x32.mat").open("ab") as file:
        file.write(b"x")
    assert "checksums differ" in refused("svhn", tmp_path)


# A user's own file


@pytest.fixture
def own() -> dict[str, np.ndarray]:
    return random_arrays((6, 7), 3)


def save(folder: Path, arrays: dict[str, np.ndarray]) -> str:
    np.savez(folder / "own.npz", **arrays)
    return f"file:{folder / 'own.npz'}"


LAYOUTS = {
    "NHW": (None, (1, 6, 7)),
    "NHW1": (1, (1, 6, 7)),
    "NHW3": (3, (3, 6, 7)),
    "N3HW": (3, (3, 6, 7)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
@pytest.mark.parametrize("compressed", [False, True])
def test_own_file(layout: str, dtype: type, compressed: bool, tmp_path: Path) -> None:
    channels, shape = LAYOUTS[layout]
    first = random_arrays(shape, 3)
    stored = dict(first)
    for array in ("train_images", "test_images"):
        images = first[array].astype(dtype)
        stored[array] = (
            images[:, 0]
            if channels is None
            else images
            if layout == "N3HW"
            else np.moveaxis(images, 1, -1)
        )
    (np.savez_compressed if compressed else np.savez)(tmp_path / "own.npz", **stored)
    name = f"file:{tmp_path / 'own.npz'}"
    dataset = load(name)
    assert (dataset.shape, dataset.classes) == (shape, 3)
    assert_holds(dataset, first)
    about = files.info(
        name, root=None, synthetic_shape=(3, 32, 32), synthetic_classes=10
    )
    assert (about.shape, about.classes, about.model) == (shape, 3, "mlp")


@pytest.mark.parametrize(
    ("shape", "model"),
    [((32, 32, 3), "cnn-cifar"), ((28, 28), "cnn-fmnist"), ((28, 27), "mlp")],
)
def test_default_model_of_an_own_file(
    shape: tuple[int, ...], model: str, tmp_path: Path
) -> None:
    name = save(tmp_path, random_arrays(shape, 3))
    assert (
        files.info(
            name, root=None, synthetic_shape=(3, 32, 32), synthetic_classes=10
        ).model
        == model
    )


def test_own_file_below_the_data_root(
    own: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, own)
    assert load("file:own.npz", tmp_path).classes == 3
    monkeypatch.chdir(tmp_path)
    assert load("file:own.npz").classes == 3


BAD_ARRAYS: list[tuple[str, Any, str]] = [
    ("train_images", None, "no array train_images"),
    ("test_labels", None, "no array test_labels"),
    ("train_images", np.zeros((12, 42), np.uint8), "[N, H, W]"),
    ("train_images", np.zeros((12, 6, 7, 2), np.uint8), "with 1 or 3 channels"),
    (
        "train_images",
        np.zeros((12, 3, 7, 3), np.uint8),
        "may be [N, C, H, W] or [N, H, W, C]",
    ),
    (
        "train_images",
        np.zeros((12, 6, 7), np.int64),
        "must be uint8, float32 or float64",
    ),
    (
        "train_images",
        np.zeros((12, 6, 7), np.float16),
        "must be uint8, float32 or float64",
    ),
    ("train_images", np.full((12, 6, 7), np.nan), "NaN or infinite"),
    ("test_images", np.full((5, 6, 7), np.inf, np.float32), "NaN or infinite"),
    ("test_images", np.zeros((5, 6, 8), np.uint8), "same shape"),
    ("test_images", np.zeros((0, 6, 7), np.uint8), "empty"),
    ("train_images", np.zeros((0, 6, 7), np.uint8), "empty"),
    ("train_labels", np.arange(11), "11 labels for 12 images"),
    ("test_labels", np.zeros((5, 1), np.int64), "has shape [5, 1]"),
    ("test_labels", np.zeros(5), "must be integers"),
    ("train_labels", np.zeros(12, bool), "must be integers"),
    ("train_labels", np.array(["cat"] * 12), "must be integers"),
    ("train_labels", np.arange(12) - 1, "holds -1"),
    ("test_labels", np.array([0, 1, 2, -5, 0], np.int8), "holds -5"),
    ("test_labels", np.array([0, 1, 2, 3, 0]), "test_labels holds 3"),
    ("train_labels", np.full(12, 2**63, np.uint64), "among only 12 samples"),
]


@pytest.mark.parametrize(("array", "value", "part"), BAD_ARRAYS)
def test_bad_own_file(
    array: str, value: Any, part: str, own: dict[str, np.ndarray], tmp_path: Path
) -> None:
    if value is None:
        del own[array]
    else:
        own[array] = value
    line = refused(save(tmp_path, own)).replace(
        str(tmp_path), ""
    )  # pytest puts the array's name into that path
    assert array in line
    assert part in line
    assert "own.npz" in line


@pytest.mark.parametrize("array", NAMES)
def test_pickles_in_an_own_file_are_never_loaded(
    array: str, own: dict[str, np.ndarray], tmp_path: Path
) -> None:
    objects = np.empty(len(own[array]), dtype=object)
    objects[:] = [Bomb(tmp_path / "exploded") for _ in objects]
    own[array] = objects
    line = refused(save(tmp_path, own)).replace(str(tmp_path), "")
    assert array in line
    assert "(a pickle), which is never loaded" in line
    assert not (tmp_path / "exploded").exists()
    with (
        np.load(tmp_path / "own.npz", allow_pickle=True) as npz,
        pytest.raises(FileExistsError),
    ):
        npz[
            array
        ]  # the bomb is live: it goes off once, and the folder is in its own way the second time
    assert (tmp_path / "exploded").exists()


@pytest.mark.parametrize("array", NAMES)
@pytest.mark.parametrize("second", ["without a suffix", "twice", "an object"])
def test_members_beside_those_that_were_checked_are_refused(
    array: str, second: str, own: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """numpy.load would take the member `train_images` for the array, and a zip file may
    hold a name twice.
    """
    name = save(tmp_path, own)
    stream = io.BytesIO()
    other = (
        own[array][:1]
        if second != "an object"
        else np.array([Bomb(tmp_path / "exploded")], dtype=object)
    )
    np.save(stream, other, allow_pickle=True)
    with (
        warnings.catch_warnings(),
        zipfile.ZipFile(tmp_path / "own.npz", "a") as archive,
    ):
        warnings.simplefilter("ignore")  # zipfile minds a name that is there
        archive.writestr(
            f"{array}.npy" if second == "twice" else array, stream.getvalue()
        )
    line = refused(name)
    assert f"{array} is there twice or without .npy" in line
    with pytest.raises(UserError, match="is there twice or without"):
        load(name)
    assert not (tmp_path / "exploded").exists()


def test_other_members_do_no_harm(own: dict[str, np.ndarray], tmp_path: Path) -> None:
    name = save(tmp_path, own)
    with zipfile.ZipFile(tmp_path / "own.npz", "a") as archive:
        archive.writestr("notes", "mine")
    files.require(name, root=None, download=False)
    assert load(name).classes == 3


def test_an_own_file_that_unpacks_to_more_than_memory_is_refused(
    own: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = save(tmp_path, own)
    monkeypatch.setattr("hpcfed.runtime.machine.usable", lambda: 100)
    assert "its arrays have 0 GiB, this machine has 0" in refused(name)


def foreign_files(folder: Path) -> Iterator[Path]:
    for name, content in (
        ("empty", b""),
        ("text", b"hello"),
        ("pickle", pickle.dumps(Bomb(folder / "exploded"))),
    ):
        (folder / name).write_bytes(content)
        yield folder / name
    np.save(folder / "single.npy", np.arange(3))
    yield folder / "single.npy"


def test_files_that_are_no_npz(tmp_path: Path) -> None:
    for path in foreign_files(tmp_path):
        assert "not an .npz file" in refused(f"file:{path}")
    assert not (tmp_path / "exploded").exists()
    assert "no file" in refused(f"file:{tmp_path / 'nowhere.npz'}")
    assert "no file" in refused(f"file:{tmp_path}")
    assert "needs a path" in refused("file:")


def test_damaged_npz(own: dict[str, np.ndarray], tmp_path: Path) -> None:
    name = save(tmp_path, own)
    whole = (tmp_path / "own.npz").read_bytes()
    for at in (
        whole.index(b"NUMPY"),
        whole.rindex(b"NUMPY") + 130,
    ):  # a header, and a byte of the labels
        (tmp_path / "own.npz").write_bytes(
            whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        )
        assert "own.npz: cannot be read" in refused(name)


# Synthetic data


def synthetic(
    shape: tuple[int, int, int] = (3, 32, 32), *, seed: int = 0, **size: int
) -> SyntheticDataset:
    sizes = {"classes": 10, "train": 1500, "test": 400} | size
    return SyntheticDataset(SyntheticSize(shape=shape, **sizes), seed=seed)


@settings(max_examples=25, deadline=None)
@given(index=st.lists(st.integers(0, 99), max_size=20), block=st.integers(1, 1000))
def test_synthetic_samples_depend_on_their_number_alone(
    index: list[int], block: int
) -> None:
    dataset = synthetic((2, 5, 9), train=100)
    whole = dataset.inputs("train", np.arange(100), device=CPU, dtype=torch.float32)
    rows = np.array(index, dtype=np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpcfed.data.datasets.BLOCK", block)
        some = dataset.inputs("train", rows, device=CPU, dtype=torch.float32)
    assert some.shape == (len(index), 2, 5, 9)
    assert torch.equal(some, whole[rows])


def test_synthetic_labels_are_balanced_and_shuffled() -> None:
    labels = synthetic(train=1003).labels("train")
    counts = np.bincount(labels)
    assert labels.dtype == np.int64
    assert counts.max() - counts.min() <= 1
    assert (np.diff(labels) % 10 == 1).mean() < 0.2


def test_synthetic_depends_on_the_seed_and_split() -> None:
    index = np.arange(5)
    first, same, other = (
        synthetic(seed=s).inputs("train", index, device=CPU, dtype=torch.float32)
        for s in (0, 0, 1)
    )
    assert torch.equal(first, same)
    assert (first != other).any()
    assert (
        synthetic(seed=0).labels("train") != synthetic(seed=1).labels("train")
    ).any()
    test = synthetic().inputs("test", index, device=CPU, dtype=torch.float32)
    assert (
        abs(float(torch.corrcoef(torch.stack([first.flatten(), test.flatten()]))[0, 1]))
        < 0.1
    )


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (1, 8, 8)])
def test_synthetic_is_standardised(shape: tuple[int, int, int]) -> None:
    images = synthetic(shape, train=500).inputs(
        "train", np.arange(500), device=CPU, dtype=torch.float32
    )
    assert abs(images.mean()) < 0.1
    assert abs(images.std() - 1) < 0.05


def nearest_mean_accuracy(
    train: np.ndarray, labels: np.ndarray, test: np.ndarray, truth: np.ndarray
) -> float:
    means = np.stack([train[labels == label].mean(axis=0) for label in range(10)])
    scores = test @ means.T - (means**2).sum(axis=1) / 2
    return float((scores.argmax(axis=1) == truth).mean())


def test_synthetic_can_be_learnt_but_not_from_a_pixel() -> None:
    dataset = synthetic()
    train, test = (all_images(dataset, split).flatten(1).numpy() for split in SPLITS)
    labels, truth = dataset.labels("train"), dataset.labels("test")
    whole = nearest_mean_accuracy(train, labels, test, truth)
    pixels = [
        nearest_mean_accuracy(train[:, [p]], labels, test[:, [p]], truth)
        for p in range(0, 3072, 150)
    ]
    assert whole > 0.6
    assert np.mean(pixels) < 0.13


@pytest.mark.gpu
def test_synthetic_is_the_same_on_a_gpu() -> None:
    index, gpu = np.arange(40), torch.device("cuda")
    on_gpu = synthetic().inputs("train", index, device=gpu, dtype=torch.float32)
    assert torch.equal(
        on_gpu.cpu(),
        synthetic().inputs("train", index, device=CPU, dtype=torch.float32),
    )


def test_synthetic_sizes_must_be_positive() -> None:
    with pytest.raises(UserError, match="at least 1"):
        SyntheticSize(shape=(3, 32, 32), classes=10, train=0, test=1)


def test_float_images_are_not_changed_by_reading_them() -> None:
    images = np.arange(48, dtype=np.float32).reshape(12, 1, 2, 2)
    labels = np.arange(12) % 3
    arrays = {
        "train_inputs": images,
        "train_targets": labels,
        "test_inputs": images,
        "test_targets": labels,
    }
    dataset = ArrayDataset("toy", arrays, classes=3)
    first = dataset.inputs("train", np.arange(12), device=CPU, dtype=torch.float32)
    assert torch.equal(
        first, dataset.inputs("train", np.arange(12), device=CPU, dtype=torch.float32)
    )


def test_digits_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.datasets import load_digits

    table, bunch = loading.digits_table(), load_digits()
    assert np.array_equal(table[:, :64], bunch.data)
    assert np.array_equal(table[:, 64], bunch.target)
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda _: None)
    assert np.array_equal(loading.digits_table(), table), (
        "without the file, the library's own loader must give the same"
    )


def test_images_beyond_all_measure_are_one_line(tmp_path: Path) -> None:
    """They are finite, and their squares are not."""
    images, labels = np.full((4, 6, 6), 1e300), np.array([0, 1, 0, 1])
    path = tmp_path / "own.npz"
    np.savez(
        path,
        train_images=images,
        train_labels=labels,
        test_images=images,
        test_labels=labels,
    )
    with pytest.raises(UserError, match="holds values beyond 1e\\+15"):
        files.require(f"file:{path}", root=None, download=False)

"""The catalogue of data sets and partitions.

Nothing here or in `files` imports torch: the command line is checked against it before
anything heavy is loaded.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class DatasetInfo:
    """What can be said about a data set without reading its images."""

    summary: str
    """One line for `hpcfed list`."""
    shape: tuple[int, int, int]
    """Channels, height, width."""
    classes: int
    model: str
    """The model that is trained when the user names none."""


DATASETS: dict[str, DatasetInfo] = {
    "digits": DatasetInfo(
        "1,797 handwritten digits of scikit-learn, needs no files",
        (1, 8, 8),
        10,
        "cnn-digits",
    ),
    "synthetic": DatasetInfo(
        "prototype + noise, any shape and size, made on the device",
        (3, 32, 32),
        10,
        "cnn-cifar",
    ),
    "mnist": DatasetInfo(
        "MNIST, 60,000 + 10,000 handwritten digits", (1, 28, 28), 10, "cnn-fmnist"
    ),
    "fashion-mnist": DatasetInfo(
        "Fashion-MNIST, 60,000 + 10,000 garments", (1, 28, 28), 10, "cnn-fmnist"
    ),
    "emnist": DatasetInfo(
        "EMNIST by class, 697,932 + 116,323 digits and letters",
        (1, 28, 28),
        62,
        "cnn-emnist",
    ),
    "svhn": DatasetInfo(
        "SVHN, 73,257 + 26,032 house number digits", (3, 32, 32), 10, "cnn-cifar"
    ),
    "cifar10": DatasetInfo(
        "CIFAR-10, 50,000 + 10,000 photographs", (3, 32, 32), 10, "cnn-cifar"
    ),
    "cifar100": DatasetInfo(
        "CIFAR-100, 50,000 + 10,000 photographs", (3, 32, 32), 100, "cnn-cifar"
    ),
}

PARTITIONS: dict[str, str] = {
    "iid": "shuffled, equal sizes",
    "dirichlet": "each class split over the clients by Dirichlet(alpha), uneven sizes",
    "sharding": "each client holds a fixed number of classes",
    "dominant": "equal sizes, a share from all classes and the rest from the client's dominant group (pFedGPA)",
}

"""The catalogue of data sets and partitions.

Nothing here or in `files` imports torch: the command line is checked against it before
anything heavy is loaded.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """What is known about a data set before its images are read."""

    description: str
    """One line; with `samples`, {train}, {test} and {total} stand for their numbers."""
    shape: tuple[int, int, int]
    """Channels, height, width."""
    classes: int
    model: str
    """The model that is trained when the user names none."""
    samples: tuple[int, int] | None = None
    """Training and test samples; None where the user's options or file decide."""

    @property
    def summary(self) -> str:
        """One line for `hpcfed list`."""
        # Without samples the text stays as it is: a user's path may contain braces.
        if self.samples is None:
            return self.description
        train, test = self.samples
        return self.description.format(
            train=f"{train:,}", test=f"{test:,}", total=f"{train + test:,}"
        )


DATASETS: dict[str, DatasetInfo] = {
    "digits": DatasetInfo(
        description="{total} handwritten digits of scikit-learn, needs no files",
        shape=(1, 8, 8),
        classes=10,
        model="cnn-digits",
        samples=(1442, 355),
    ),
    "synthetic": DatasetInfo(
        description="prototype + noise, any shape and size, made on the device",
        shape=(3, 32, 32),
        classes=10,
        model="cnn-cifar",
    ),
    "mnist": DatasetInfo(
        description="MNIST, {train} + {test} handwritten digits",
        shape=(1, 28, 28),
        classes=10,
        model="cnn-fmnist",
        samples=(60_000, 10_000),
    ),
    "fashion-mnist": DatasetInfo(
        description="Fashion-MNIST, {train} + {test} garments",
        shape=(1, 28, 28),
        classes=10,
        model="cnn-fmnist",
        samples=(60_000, 10_000),
    ),
    "emnist": DatasetInfo(
        description="EMNIST by class, {train} + {test} digits and letters",
        shape=(1, 28, 28),
        classes=62,
        model="cnn-emnist",
        samples=(697_932, 116_323),
    ),
    "svhn": DatasetInfo(
        description="SVHN, {train} + {test} house number digits",
        shape=(3, 32, 32),
        classes=10,
        model="cnn-cifar",
        samples=(73_257, 26_032),
    ),
    "cifar10": DatasetInfo(
        description="CIFAR-10, {train} + {test} photographs",
        shape=(3, 32, 32),
        classes=10,
        model="cnn-cifar",
        samples=(50_000, 10_000),
    ),
    "cifar100": DatasetInfo(
        description="CIFAR-100, {train} + {test} photographs",
        shape=(3, 32, 32),
        classes=100,
        model="cnn-cifar",
        samples=(50_000, 10_000),
    ),
}

PARTITIONS: dict[str, str] = {
    "iid": "shuffled, equal sizes",
    "dirichlet": "each class split over the clients by Dirichlet(alpha), uneven sizes",
    "sharding": "each client holds a fixed number of classes",
    "dominant": "equal sizes, a share from all classes and the rest from the client's "
    "dominant group (pFedGPA)",
}


@dataclass(frozen=True, kw_only=True)
class PartitionPlan:
    """How samples are split among clients, and among how many."""

    scheme: str
    """One of PARTITIONS."""
    clients: int
    """All clients, those that join later included."""
    classes: int
    seed: int
    alpha: float
    """dirichlet: the smaller, the more uneven."""
    classes_per_client: int
    """sharding: classes that each client holds."""
    uniform_share: float
    """dominant: the share of a client's samples that comes from all classes alike."""
    train_per_client: int
    """dominant: training samples of each client."""
    test_per_client: int
    """dominant: test samples of each client."""
    validation: int = 0
    """Training samples that the server holds back, as many of each class."""
    new_clients: int = 0
    """With `new_classes`: so many clients, the last ones, share these classes."""
    new_classes: int = 0
    """Classes, drawn at random, that only new clients hold; 0: all clients share all."""

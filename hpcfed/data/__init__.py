"""The catalogue of data sets and partitions.

Neither this module nor `files` imports torch: the command line is checked with them
before anything heavy is loaded.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Task = Literal["classification", "next-token", "regression"]
"""What a network learns to predict about a sample."""


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """What is known about a data set before its samples are read."""

    description: str
    """One line; with `samples`, {train}, {test} and {total} are replaced by numbers."""
    shape: tuple[int, ...]
    """The shape of one sample: (channels, height, width) of an image, (length,) of tokens,
    (features,) of a table's row.
    """
    classes: int
    """Outputs of a network: classes, size of the vocabulary, or numbers to predict."""
    model: str
    """The default model; empty: the user must name one."""
    task: Task = "classification"
    vocabulary: int = 0
    """Number of different input tokens; 0: inputs are numbers."""
    owners: int = 0
    """Number of natural clients, if the data set knows its owners; 0: it does not."""
    samples: tuple[int, int] | None = None
    """Training and test samples; None if the options decide."""

    @property
    def side(self) -> int:
        """The smaller side of an image in pixels; 0 if samples are not images."""
        return min(self.shape[1:]) if len(self.shape) == 3 else 0

    @property
    def summary(self) -> str:
        """One line for `hpcfed list`."""
        if self.samples is None:
            return self.description
        train, test = self.samples
        # Not `format`: a user's path may contain other braces.
        text = self.description.replace("{train}", f"{train:,}")
        text = text.replace("{test}", f"{test:,}")
        return text.replace("{total}", f"{train + test:,}")


@dataclass(frozen=True)
class TextPlan:
    """How text files, or prompts and responses, become samples."""

    clients: str = "file"
    """`file`, or a regular expression whose first group in a name is the client."""
    tokens: str = "chars"
    """`chars`, `bytes` or `tokeniser`."""
    length: int = 128
    """Tokens per sample."""
    test: float = 0.1
    """The share of each file, taken from its end, for testing."""
    tokeniser: Path | None = None
    """The folder with the tokeniser."""
    loss: str = "responses"
    """What is predicted of prompts and responses: `responses` or `all`."""
    pack: bool = False
    """Whether a row may hold several prompts and responses."""
    apart: bool = False
    """Whether these do not see each other: ~t stands for a token t that begins one."""


@dataclass(frozen=True)
class Reading:
    """How the user's own data is read."""

    options: str = "{}"
    """JSON of the keywords for a user's function."""
    text: TextPlan = TextPlan()
    natural: bool = False
    """Every client is judged by its own samples. If the test set has no owners, they
    are split off the training samples.
    """


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
    "natural": "as the data set says whose samples are whose",
}

NEED_CLASSES = ("dirichlet", "sharding", "dominant")
"""Partitions that deal out classes, and so only work for classification."""


@dataclass(frozen=True, kw_only=True)
class PartitionPlan:
    """How samples are split among clients, and among how many."""

    scheme: str
    """One of PARTITIONS."""
    clients: int
    """All clients, including those that join later."""
    classes: int
    """1 if samples have no classes."""
    seed: int
    alpha: float
    """dirichlet: the smaller, the more uneven."""
    classes_per_client: int
    """sharding: number of classes that each client holds."""
    uniform_share: float
    """dominant: the share of a client's samples that comes evenly from all classes."""
    train_per_client: int
    """dominant: training samples of each client."""
    test_per_client: int
    """dominant: test samples of each client."""
    validation: int = 0
    """Training samples that the server holds back, the same number of each class."""
    new_clients: int = 0
    """Number of new clients, the last ones. They share `new_classes`; under natural,
    they are drawn after the others.
    """
    test_classes: Literal["share", "held"] = "share"
    """Whether a client has its share of its classes' test samples, or all."""
    new_classes: int = 0
    """Number of random classes that only new clients hold; 0: all clients share all."""

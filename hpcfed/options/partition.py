"""Options of the partition: how samples are split over clients and validation set."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from hpcfed.data import NEED_CLASSES, PARTITIONS, DatasetInfo, PartitionPlan
from hpcfed.errors import UserError, unknown
from hpcfed.options.data import DataOptions
from hpcfed.options.declare import LEFT_OUT, Choice, Need, option
from hpcfed.options.run import NEWCOMERS, NewcomerOptions


def _check_threshold(value: Any) -> Any:
    """Refuse a value that is neither a number of samples nor `mean`."""
    is_number = str(value).isdecimal()
    if not is_number and value not in (None, "mean"):
        raise ValueError("must be a number of samples, or mean")
    return value


Threshold = Annotated[int | Literal["mean"] | None, BeforeValidator(_check_threshold)]

_SIZED = Need(
    "--partition dominant or --dataset synthetic",
    lambda run: run.partition == "dominant" or run.dataset == "synthetic",
)
_SUPPLEMENT = Need("--supplement", lambda run: run.supplement)


def _scheme(name: str) -> Need:
    return Need(f"--partition {name}", lambda run: run.partition == name)


class PartitionOptions(DataOptions, NewcomerOptions):
    title: ClassVar[str] = "partition of the data"
    poses_problem: ClassVar[bool] = True

    partition: str = option(
        "dirichlet",
        "how samples are spread over clients; natural keeps each client's own "
        "samples, and is the default if the data set names its clients",
        in_every_record=True,
        also="split partitioning partitioner distribution partition_method iid "
        "data_distribution",
    )
    alpha: float = option(
        0.5,
        "dirichlet: concentration; smaller is more uneven",
        gt=0,
        stackable=True,
        also="heterogeneity beta concentration dirichlet dirichlet_alpha "
        "dir_alpha non_iid noniid partition_alpha",
        needs=_scheme("dirichlet"),
    )
    classes_per_client: int = option(
        2,
        "sharding: number of classes that a client holds",
        ge=1,
        also="shards shards_per_client num_classes_per_client labels_per_client "
        "num_shards",
        needs=_scheme("sharding"),
    )
    uniform_share: float = option(
        0.2,
        "dominant: share of a client's samples drawn from all classes",
        ge=0,
        le=1,
        needs=_scheme("dominant"),
    )
    # Synthetic data has any size that we ask for; other schemes use what there is.
    train_per_client: int = option(
        600, "dominant and synthetic: training samples per client", ge=1, needs=_SIZED
    )
    test_per_client: int = option(
        100, "dominant and synthetic: test samples per client", ge=1, needs=_SIZED
    )
    test_classes: Literal["share", "held"] = option(
        "share",
        "test data of a client: distributed like its training data, or (held) all test "
        "samples of the classes that it holds",
        needs=Need(
            "--partition dirichlet, sharding or dominant",
            lambda run: run.partition in NEED_CLASSES,
        ),
    )
    # Below 1: known clients need some classes, too.
    new_classes: float = option(
        0.0,
        "share of the classes that only new clients hold; 0: every client may hold "
        "every class",
        ge=0,
        lt=1,
        calibration=LEFT_OUT,
        needs=NEWCOMERS,
    )
    # The server's validation set, and how much of it goes to clients with little data.
    validation: int | None = option(
        None,
        "size of the server's balanced validation set, taken from the training data "
        "(default: none; if the method or --supplement needs one, 100 of each class, "
        "at most a tenth)",
        ge=0,
        zero_was_unset=True,
        also="val val_size validation_size",
    )
    supplement: bool = option(
        False,
        "before the first round, give samples of the validation set to clients with "
        "little data",
    )
    supplement_below: Threshold = option(
        None,
        "clients with fewer training samples than this are given some; mean: the "
        "clients' average (default: --batch-size)",
        zero_was_unset=True,
        stackable=True,
        needs=_SUPPLEMENT,
    )
    supplement_share: float = option(
        0.01,
        "the most a client is given, as a share of the validation set",
        gt=0,
        le=1,
        stackable=True,
        needs=_SUPPLEMENT,
    )

    @property
    def seed_of_data(self) -> int:
        """The seed of the partition and of synthetic data."""
        return self.seed if self.data_seed is None else self.data_seed

    def num_new_classes(self, classes: int) -> int:
        """Return the number of classes that only new clients hold."""
        return round(self.new_classes * classes)

    def plan(self, classes: int, validation: int) -> PartitionPlan:
        """Return the plan for a data set with this number of classes.

        `validation` is the size of the validation set, whether the user gave it or not.
        """
        apart = self.new_classes > 0 or self.partition == "natural"
        return PartitionPlan(
            scheme=self.partition,
            clients=self.clients + self.new_clients,
            classes=classes,
            seed=self.seed_of_data,
            alpha=self.alpha,
            classes_per_client=self.classes_per_client,
            uniform_share=self.uniform_share,
            train_per_client=self.train_per_client,
            test_per_client=self.test_per_client,
            test_classes=self.test_classes,
            validation=validation,
            # If all clients may hold all classes, new clients are treated like others.
            new_clients=self.new_clients if apart else 0,
            new_classes=self.num_new_classes(classes),
        )


def partition_choices(config: PartitionOptions) -> Iterable[Choice]:
    """Replace the default partition if samples have owners, or no classes."""
    try:
        data = config.data()
    except UserError:
        return  # `check_data` refuses it with a better message
    task = data.task
    if data.owners:
        reason = f"{config.dataset} says whose samples are whose"
        yield Choice(
            "partition", "natural", f"{reason}; --partition iid deals them out"
        )
    elif task != "classification" and config.partition in NEED_CLASSES:
        reason = f"{config.partition} deals out classes, and {task} has none"
        yield Choice("partition", "iid", f"{reason}; --partition takes others")


def client_choices(config: PartitionOptions) -> Iterable[Choice]:
    """Use all natural clients of the data set by default."""
    if config.partition != "natural":
        return
    try:
        owners = config.data().owners
    except UserError:
        return
    clients = owners - config.new_clients
    if clients > 0 and clients != config.clients:
        left = " beside the new ones" if config.new_clients else ""
        reason = f"all that {config.dataset} names{left}"
        yield Choice("clients", clients, f"{reason}; --clients takes a sample of them")


def check_partition(config: PartitionOptions) -> None:
    """Refuse an unknown scheme, and one that needs more classes than there are."""
    data = config.data()
    if config.partition not in PARTITIONS:
        raise unknown("partition", config.partition, PARTITIONS)
    if config.partition == "natural":
        _check_natural(config, data)
    if data.task != "classification":
        _check_without_classes(config, data)
        return
    check_classes(config, data)
    if config.validation is not None and config.validation < data.classes:
        raise UserError(
            f"--validation {config.validation} cannot hold all {data.classes} classes; "
            "use a multiple of them"
        )


def _check_natural(config: PartitionOptions, data: DatasetInfo) -> None:
    """Refuse natural clients if the data set names none, or too few."""
    if not data.owners:
        raise UserError(
            f"--partition natural: {config.dataset} does not say whose samples are "
            "whose; give it train_clients, or use --partition dirichlet"
        )
    asked = config.clients + config.new_clients
    if asked > data.owners:
        new = f" and --new-clients {config.new_clients}" if config.new_clients else ""
        raise UserError(
            f"--clients {config.clients}{new}, but {config.dataset} names "
            f"{data.owners} clients; ask for fewer, or use --partition iid"
        )
    if config.new_classes:
        raise UserError(
            f"--new-classes {config.new_classes} moves classes between clients, but "
            "--partition natural keeps the data as it is; leave it out"
        )


def _check_without_classes(config: PartitionOptions, data: DatasetInfo) -> None:
    """Refuse a partition by classes of data without classes."""
    why = f"deals out classes, and {config.dataset} is for {data.task}"
    if config.partition in NEED_CLASSES:
        raise UserError(f"--partition {config.partition} {why}; use --partition iid")
    if config.new_classes:
        raise UserError(f"--new-classes {config.new_classes} {why}; leave it out")


def check_classes(config: PartitionOptions, data: DatasetInfo) -> None:
    """Refuse a partition that asks for more classes than there are."""
    new = config.num_new_classes(data.classes)
    if config.new_classes and not 0 < new < data.classes:
        raise UserError(
            f"--new-classes {config.new_classes} of {data.classes} classes leaves no "
            "class to the known or to the new clients"
        )
    if config.partition != "sharding":
        return
    had = f"has {data.classes} classes"
    if not new:
        _check_sharding(config, data.classes, had)
        return
    # Known and new clients hold disjoint classes; each side needs enough of them.
    known = data.classes - new
    _check_sharding(config, known, f"leaves {known} of {data.classes} classes")
    for_new = f"leaves {new} of {data.classes} classes for new clients"
    _check_sharding(config, new, for_new)


def _check_sharding(config: PartitionOptions, classes: int, had: str) -> None:
    if config.classes_per_client > classes:
        raise UserError(
            f"--classes-per-client {config.classes_per_client}, but "
            f"{config.dataset} {had}"
        )

"""What a run is: typed options with their limits and defaults, from a TOML file and
from flags.

Imports no torch: a command line is checked, and its mistakes are reported, before
anything heavy starts.
"""

import os
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar
from unicodedata import category

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from hpcfed.config.attacks import ATTACKS, NEED_BENIGN
from hpcfed.data import PARTITIONS, DatasetInfo, files
from hpcfed.errors import UserError, count, did_you_mean, unknown
from hpcfed.models import MODELS
from hpcfed.record.folder import check_out
from hpcfed.runtime import memory
from hpcfed.runtime.launcher import Launch

if TYPE_CHECKING:
    from hpcfed.models.layout import Layout

T = TypeVar("T", bound="Options")

_FOLDERS, _MACHINE = (
    {"out", "overwrite", "resume", "requeue", "data_root", "download"},
    {"device", "backend"},
)
ANYWHERE = _FOLDERS | _MACHINE | {"checkpoint_every", "checkpoint_minutes"}
"""Options that may differ between calls on one folder of results, because no figure
depends on them.
"""

CHOSEN_LATER = {"server": "auto", "autoencoder_samples": 0, "denoiser_samples": 0}
"""Values for which a run puts its own choice when it knows the device; its record holds
the choice.
"""

MOST_TOML = 2**20
"""Bytes of a file of options at most."""

FLOATS = (2.0**-126, 2.0**128 * (1 - 2.0**-24))
"""The least and the largest number above 0 that float32 holds in full, in which runs
compute.
"""

MOST = 10**12
"""The largest whole number of an option: more of anything is a slip, and products would
overflow 64 bits.
"""

MOST_SEEDS = 256
"""Seeds that a run advances together at most; each has a thread of its own."""


def read_seeds(written: Any) -> Any:
    """`0..4` and `0,3,7` as lists of integers; a list, as in a TOML file, is left to
    its type.
    """
    if not isinstance(written, str):
        return written
    words = written.split("..") if ".." in written else written.split(",")
    if not all(word.strip().isdecimal() for word in words) or (
        ".." in written and len(words) != 2
    ):
        raise ValueError("must be a range such as 0..4 or a list such as 0,3,7")
    if any(len(word) > 100 for word in words):
        raise ValueError("must be seeds below 2^63")
    numbers = [int(word) for word in words]
    if ".." not in written:
        return numbers
    first, last = numbers
    if first > last:
        raise ValueError(f"must count upwards, as in {last}..{first}")
    return list(range(first, min(last, first + MOST_SEEDS) + 1))


def check_seeds(seeds: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if seeds is not None and not 0 < len(seeds) <= MOST_SEEDS:
        raise ValueError(f"must be 1 to {MOST_SEEDS} seeds")
    if seeds is not None and len(set(seeds)) < len(seeds):
        raise ValueError("must name every seed once")
    return seeds


Seed = Annotated[int, Field(ge=0, lt=2**63)]
Seeds = Annotated[
    tuple[Seed, ...] | None, BeforeValidator(read_seeds), AfterValidator(check_seeds)
]


class Choice(NamedTuple):
    """What stands in place of a default that does not suit the run."""

    option: str
    value: Any
    because: str
    """The reason, and how to get something else."""

    def __str__(self) -> str:
        return f"{flag_of(self.option)} is {self.value}: {self.because}"


class Switch(NamedTuple):
    """An option that acts only where something else is on."""

    option: str
    wanted: str
    """What turns it on, as one types it."""
    on: bool


def flag_of(option: str) -> str:
    return f"--{option.replace('_', '-')}"


class Options(BaseModel):
    """What `hpcfed run` shows as flags; a method adds its own by a class
    `Options(config.Options)` in its file.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    has_server: ClassVar[bool] = False
    """Whether the method has a model on the server, which ranks of its own can train.
    """
    uploads: ClassVar[bool] = True
    """Whether clients send anything to the server, so that attackers can forge it."""
    averages: ClassVar[bool] = True
    """Whether the method makes one row of the uploads, which other rules than the mean
    can do too.
    """
    all_train: ClassVar[bool] = False
    """Whether clients train in rounds for which they were not sampled."""
    names_layers: ClassVar[bool] = False
    """Whether the method is about layers that a network may not have; `check_layout`
    then judges the network.
    """
    trains_by: ClassVar[Mapping[str, str]] = {}
    """Options of local training that the method replaces by its own; they then act on
    new clients alone.
    """

    def fit(self, config: "RunConfig", ranks: int) -> Iterable[Choice]:
        """Name defaults that do not suit the run on so many ranks, and what suits;
        whatever the user gave stays.
        """
        return ()

    def choose(self, *, gpu: bool) -> Iterable[Choice]:
        """Name what `CHOSEN_LATER` stands for, now that the device of the server's
        model is known.
        """
        return ()

    def switches(self, config: "RunConfig") -> Iterable[Switch]:
        """Name the method's options that act only where something else is on."""
        return ()

    def check(self, config: "RunConfig") -> None:
        """Refuses, before anything starts, options of a method that do not fit the rest
        of the run.
        """

    def check_ranks(self, ranks: int) -> None:
        """The same for the number of ranks that train the server's model."""

    def check_layout(self, layout: "Layout", network: str) -> None:
        """The same for the layers of the network, which is built for that."""


def option(
    default: Any, description: str, *, group: str = "method", **limits: Any
) -> Any:
    """A field with its help text; `limits` are pydantic's: ge, gt, le, lt, pattern."""
    return Field(
        default, description=description, json_schema_extra={"group": group}, **limits
    )


class RunConfig(Options):
    method: str = option(
        "fedavg",
        "what the clients and the server do; `hpcfed list` names all",
        group="run",
    )
    rounds: int = option(20, "communication rounds", group="run", ge=1)
    clients: int = option(20, "simulated clients", group="run", ge=1)
    new_clients: int = option(
        0,
        "further clients that join after the last round, to see how soon they are as good",
        group="run",
        ge=0,
    )
    new_updates: int = option(
        5, "local updates of --epochs that new clients get", group="run", ge=1
    )
    join_rounds: int = option(
        1, "updates over which new clients join, as many in each", group="run", ge=1
    )
    new_starts: Literal["all", "method"] = option(
        "all",
        "where new clients begin: from a random row and the global model too, or as "
        "the method says",
        group="run",
    )
    participation: float = option(
        1.0,
        "share of the clients sampled in a round, at least one",
        group="run",
        gt=0,
        le=1,
    )
    seed: Seed = option(0, "seed of every random stream", group="run")
    seeds: Seeds = option(
        None,
        "several seeds at once, 0..4 or 0,3,7: more rows of one matrix, results in OUT/seed-N",
        group="run",
    )
    out: Path | None = option(
        None, "folder for the results (default: runs/METHOD-DATASET-TIME)", group="run"
    )
    overwrite: bool = option(
        False, "replace what runs have written to --out", group="run"
    )
    target_accuracy: float | None = option(
        None,
        "per cent, as in 80: when the global model, or else the clients' mean, reaches "
        "it is recorded",
        group="run",
        gt=1,
        le=100,
    )
    stop_at_target: bool = option(
        False, "end the run in the round that reaches --target-accuracy", group="run"
    )
    checkpoint_every: int = option(
        0,
        "write a checkpoint every N rounds, beside those of --checkpoint-minutes",
        group="run",
        ge=0,
    )
    checkpoint_minutes: float = option(
        10.0,
        "write a checkpoint when the last is so old; 0: never for that reason",
        group="run",
        ge=0,
    )
    resume: Path | None = option(
        None,
        "go on with the run in this folder, from its last checkpoint; only --device, "
        "--backend and --overwrite (begin "
        "anew where there is no checkpoint) may stand beside it",
        group="run",
    )
    requeue: bool = option(
        False,
        "in a job that Slurm may requeue: begin, or go on with what this job itself "
        "has written to --out "
        "(default: runs/slurm-JOB)",
        group="run",
    )
    evaluate_every: int = option(
        1, "evaluate every N rounds, and after the last", group="run", ge=1
    )
    snapshot_every: int = option(
        0,
        "write clients' rows to params-RANK.h5 every N rounds; 0: never",
        group="run",
        ge=0,
    )

    dataset: str = option(
        "digits", "a data set, or file:PATH.npz with your own", group="data"
    )
    data_root: Path | None = option(
        None,
        "folder of the data sets (default: $HPCFED_DATA, else ./data)",
        group="data",
    )
    download: bool = option(
        False, "let torchvision download what is missing", group="data"
    )
    partition: str = option(
        "dirichlet", "how data is spread over clients", group="data"
    )
    alpha: float = option(
        0.5, "dirichlet: concentration; smaller is more uneven", group="data", gt=0
    )
    classes_per_client: int = option(
        2, "sharding: classes that a client holds", group="data", ge=1
    )
    new_classes: float = option(
        0.0,
        "share of the classes that new clients hold and known ones do not; 0: all may hold all",
        group="data",
        ge=0,
        lt=1,
    )
    uniform_share: float = option(
        0.2, "dominant: share drawn from all classes", group="data", ge=0, le=1
    )
    train_per_client: int = option(
        600, "dominant and synthetic: training samples per client", group="data", ge=1
    )
    test_per_client: int = option(
        100, "dominant and synthetic: test samples per client", group="data", ge=1
    )
    validation: int = option(
        0,
        "samples of the server's balanced validation set, taken from train; 0: none, "
        "or where one is needed 100 of "
        "each class, at most a tenth",
        group="data",
        ge=0,
    )
    supplement: bool = option(
        False,
        "before the first round, clients with little data are given samples of the validation set",
        group="data",
    )
    supplement_below: int = option(
        0,
        "who asks: clients with fewer training samples; 0: than --batch-size",
        group="data",
        ge=0,
    )
    supplement_share: float = option(
        0.01,
        "the most that a client is given, as a share of the validation set",
        group="data",
        gt=0,
        le=1,
    )
    synthetic_shape: str = option(
        "3x32x32",
        "synthetic: channels x height x width",
        group="data",
        pattern=r"^[1-9]\d{0,4}x[1-9]\d{0,4}x[1-9]\d{0,4}$",
    )
    synthetic_classes: int = option(10, "synthetic: classes", group="data", ge=2)

    model: str = option(
        "auto", "the network; auto: the data set's usual one", group="training"
    )
    augment: Literal["none", "crop-flip"] = option(
        "none",
        "what training does to images: shift by up to 4 pixels each way and mirror, "
        "anew every time",
        group="training",
    )
    epochs: int = option(
        2, "local epochs per round", group="training", ge=1, le=100_000
    )
    batch_size: int = option(
        16, "samples per local step", group="training", ge=1, lt=2**31
    )
    lr: float = option(0.05, "learning rate", group="training", gt=0)
    lr_decay: float = option(
        1.0,
        "factor on the learning rate after every round",
        group="training",
        gt=0,
        le=1,
    )
    momentum: float = option(
        0.9,
        "momentum of local SGD; starts anew each round",
        group="training",
        ge=0,
        lt=1,
    )
    weight_decay: float = option(
        0.0, "L2 decay of the local SGD", group="training", ge=0
    )
    clip: float = option(
        0.0, "largest norm of a client's gradient; 0: no limit", group="training", ge=0
    )

    on_bad_update: Literal["exclude", "stop"] = option(
        "exclude", "clients whose update is NaN or infinite: leave them out and count them, or end the run",
        group="attacks",
    )  # fmt: skip
    attack: str = option(
        "none", "what malicious clients do; `hpcfed list` names all", group="attacks"
    )
    attackers: float = option(
        0.2,
        "malicious clients: below 1 a share of the clients, from 1 on a number",
        group="attacks",
        gt=0,
    )
    attack_strength: float = option(
        1.0,
        "ipm: ε; sign-flip, noise: size by the attacker's own update",
        group="attacks",
        ge=0,
    )
    aggregation: Literal["mean", "median", "trimmed-mean", "krum", "multi-krum"] = (
        option("mean", "how the server makes one row of the uploads", group="attacks")
    )
    tolerance: float = option(
        0.2,
        "share of the uploads that may be malicious: trimmed-mean drops so many at "
        "each end, krum expects so many",
        group="attacks",
        ge=0,
        lt=0.5,
    )
    krum_keep: int = option(
        0,
        "multi-krum: uploads in its mean; 0: all but those expected",
        group="attacks",
        ge=0,
    )

    engine: Literal["auto", "batched", "loop"] = option(
        "auto",
        "advance clients together (batched) or one by one (loop)",
        group="machine",
    )
    server_ranks: int = option(
        0,
        "the last N ranks train the server's model and host no clients; 0: all ranks do both",
        group="machine",
        ge=0,
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "where clients live", group="machine"
    )
    backend: Literal["auto", "nccl", "gloo"] = option(
        "auto",
        "what ranks talk through; auto: NCCL where every rank has a GPU of its own, "
        "otherwise gloo; nccl also works "
        "where ranks share a GPU, to prove that a run is right there, not to be fast",
        group="machine",
    )
    stall_timeout: float = option(
        3600.0, "seconds in one phase after which a rank takes the run for hung and ends it (ten times as many while "
        "the server learns); 0: never", group="machine", ge=0,
    )  # fmt: skip
    precision: Literal["bf16", "tf32", "fp32", "fp64"] = option(
        "tf32",
        "arithmetic; tf32 is float32 on devices without it; bf16 is for GPUs and "
        "clients that are trained one by one, "
        "and tf32 for others; rows are float32 in all three",
        group="machine",
    )
    placement: Literal["steps", "measured"] = option(
        "measured",
        "which rank hosts which client: by their steps alone, or by steps at first and "
        "anew when measured times differ "
        "between ranks; with --snapshot-every or --deterministic clients stay where they are",
        group="machine",
    )
    deterministic: bool = option(
        False,
        "bit-identical repeats: deterministic kernels, sums in client order",
        group="machine",
    )

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of synthetic images."""
        channels, height, width = (int(n) for n in self.synthetic_shape.split("x"))
        return channels, height, width

    @property
    def root(self) -> Path:
        return self.data_root or Path(os.environ.get("HPCFED_DATA") or "data")

    def data(self) -> DatasetInfo:
        """Shape and classes of the data set, without loading it."""
        return files.info(
            self.dataset,
            root=self.root,
            synthetic_shape=self.shape,
            synthetic_classes=self.synthetic_classes,
        )

    @property
    def cohort_size(self) -> int:
        """Clients that are sampled in a round."""
        return max(1, round(self.participation * self.clients))

    @property
    def num_attackers(self) -> int:
        if self.attack == "none":
            return 0
        return (
            round(self.attackers * self.clients)
            if self.attackers < 1
            else int(self.attackers)
        )

    def fit(self, config: "RunConfig", ranks: int) -> Iterable[Choice]:
        if self.attack != "none" and not self.num_attackers:
            reason = f"a share of {self.attackers} of {count(self.clients, 'client')} would be none"
            yield Choice("attackers", 1.0, f"{reason}; --attackers takes other numbers")

    @property
    def movable(self) -> bool:
        """Clients may move: no snapshot file counts on its clients, and no bits depend
        on the clock.
        """
        return (
            self.placement == "measured"
            and not self.snapshot_every
            and not self.deterministic
        )

    def network(self) -> str:
        return self.data().model if self.model == "auto" else self.model


@dataclass(frozen=True)
class Settings:
    """A resolved run: what every run has, and what its method adds."""

    config: RunConfig
    options: Options
    asked: frozenset[str] = field(default=frozenset(), compare=False)
    """Options that the user gave for this very run; those that cannot act are refused.
    """
    choices: tuple[Choice, ...] = field(default=(), compare=False)
    """What was chosen in place of defaults; the run says so when it starts."""

    def flat(self) -> dict[str, Any]:
        """All options by name, as JSON values."""
        return {
            **self.config.model_dump(mode="json"),
            **self.options.model_dump(mode="json"),
        }

    def of_seed(self, seed: int) -> "Settings":
        """The same run with this seed alone, in its own folder."""
        out = self.config.out and self.config.out / f"seed-{seed}"
        return replace(
            self,
            config=self.config.model_copy(
                update={"seed": seed, "seeds": None, "out": out}
            ),
        )

    def adapted(self, choices: Iterable[Choice]) -> "Settings":
        """Settings of a run with these values in place of its own."""
        found = self
        for choice in choices:
            change = {choice.option: choice.value}
            if choice.option in RunConfig.model_fields:
                found = replace(found, config=found.config.model_copy(update=change))
            else:
                found = replace(found, options=found.options.model_copy(update=change))
            found = replace(found, choices=(*found.choices, choice))
        return found

    def on_device(self, *, gpu: bool) -> "Settings":
        """Settings with what is chosen by the device of the server's model."""
        return self.adapted(self.options.choose(gpu=gpu))


def load_toml(path: Path) -> dict[str, Any]:
    """The file as it is; one line for the user where it cannot be read."""
    try:
        found = (
            path.stat()
        )  # before it is opened: a pipe may have no end, nor may it ever begin
        if not S_ISREG(found.st_mode) and not S_ISDIR(found.st_mode):
            raise UserError(
                f"{path} is no regular file; options are read from a file of text"
            )
        if found.st_size > MOST_TOML:
            raise UserError(
                f"{path} has {found.st_size:,} bytes, which no file of options has"
            )
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # TOML's own, text that is none, and numbers and lists without end
        raise UserError(f"{path} is not valid TOML: {error}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The file's keys, with underscores; tables are refused, since options are flat."""
    content = load_toml(path)
    for key, value in content.items():
        if isinstance(value, dict):
            raise UserError(
                f"{path}: '{key}' is a table; options are plain keys, such as rounds = 10"
            )
    if "resume" in content:
        raise UserError(
            f"{path}: resume goes on the command line alone, as in hpcfed run --resume "
            f"{content['resume']}"
        )
    return by_option(content, f"{path}")


def by_option(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The table with underscores in its keys; an option that is spelt in both ways has
    two values.
    """
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in values:
            raise UserError(
                f"{where}: {name} is there twice, once as {name.replace('_', '-')}; "
                "keep one of them"
            )
        values[name] = value
    return values


def resolve(
    values: Mapping[str, Any],
    sources: Mapping[str, str],
    method_options: type[Options],
    *,
    shared: Collection[str] = (),
    ranks: int = 1,
) -> Settings:
    """Typed settings from raw values; `sources` says how the user wrote each name, for
    error messages.

    Values of `shared` names were given for several runs, of which some may have no use
    for them. Defaults that do not suit the run on so many ranks give way to others.
    """
    known = [*RunConfig.model_fields, *method_options.model_fields]
    for name in values:
        if name not in known:
            raise UserError(
                f"{sources[name]}: unknown option{did_you_mean(name, known)}"
            )
    if "seed" in values and "seeds" in values:
        raise UserError(
            f"{sources['seed']} and {sources['seeds']} exclude each other; keep one of them"
        )
    for name, value in values.items():
        field = method_options.model_fields.get(name) or RunConfig.model_fields[name]
        if (
            isinstance(value, bool) and field.annotation is not bool
        ):  # pydantic would take it for 1 or 0
            raise UserError(
                f"{sources[name]}: must have a value, got {str(value).lower()}"
            )
        if (
            value == "" and field.annotation == Path | None
        ):  # a shell's variable that is not set; not this folder
            raise UserError(f"{sources[name]}: must be a path, got nothing")
        if isinstance(value, str):
            check_text(value, sources.get(name, name))
    own = {
        name: value
        for name, value in values.items()
        if name in method_options.model_fields
    }
    common = {name: value for name, value in values.items() if name not in own}
    settings = Settings(
        _validated(RunConfig, common, sources),
        _validated(method_options, own, sources),
        asked=frozenset(values) - frozenset(shared),
    )
    wanted = [
        *settings.config.fit(settings.config, ranks),
        *settings.options.fit(settings.config, ranks),
    ]
    return settings.adapted(
        choice for choice in wanted if values.get(choice.option, "auto") == "auto"
    )


def check_text(text: str, source: str) -> None:
    """Refuse what a record could not hold: bytes that are no UTF-8, and characters that
    a terminal obeys.
    """
    if "\0" in text:
        raise UserError(f"{source}: must be without a null character, got {text!r}")
    if any(
        category(letter) == "Cs" for letter in text
    ):  # how Python keeps bytes of the command line that are none
        raise UserError(f"{source}: must be UTF-8, got {text!r}")
    if any(category(letter) == "Cc" for letter in text):
        raise UserError(f"{source}: must be without control characters, got {text!r}")


def check(settings: Settings, launch: Launch) -> None:
    """Everything that can be known to be wrong before MPI or a device starts."""
    config = settings.config
    files.require(config.dataset, root=config.root, download=config.download)
    data = config.data()
    if config.partition not in PARTITIONS:
        raise unknown("partition", config.partition, PARTITIONS)
    if config.model not in ("auto", *MODELS):
        raise unknown("model", config.model, ("auto", *MODELS))
    smallest, side = MODELS[config.network()].smallest, min(data.shape[1:])
    if side < smallest:
        shape = "x".join(str(n) for n in data.shape)
        raise UserError(
            f"model {config.network()} needs images of at least {smallest} pixels a side, "
            f"{config.dataset} has {shape}; use --model cnn-digits or mlp"
        )
    _check_classes(config, data)
    if 0 < config.validation < data.classes:
        raise UserError(
            f"--validation {config.validation} cannot hold all {data.classes} classes; "
            "use a multiple of them"
        )
    if config.snapshot_every > config.rounds:
        raise UserError(
            f"--snapshot-every {config.snapshot_every}, but the run has only {config.rounds} rounds"
        )
    if config.stop_at_target and settings.options.has_server:
        raise UserError(
            f"--stop-at-target: the server of method {config.method} learns only after "
            "the last round"
        )
    if config.join_rounds > min(
        config.new_clients or config.join_rounds, config.new_updates
    ):
        raise UserError(
            f"--join-rounds {config.join_rounds} are more than --new-clients "
            f"{config.new_clients} or --new-updates "
            f"{config.new_updates}"
        )
    if config.join_rounds > 1 and settings.options.has_server:
        raise UserError(
            f"--join-rounds: the server of method {config.method} guides all new clients at once"
        )
    _check_size(config)
    _check_synthetic(config, max(1, launch.size - config.server_ranks))
    _check_attacks(settings)
    _check_switches(settings)
    _check_aggregation(settings)
    _check_ranks(settings, launch)
    settings.options.check(config)
    if config.out is not None and config.resume is None:
        check_out(config.out, overwrite=config.overwrite)


def _check_size(config: RunConfig) -> None:
    """Refuses a run whose results alone would fill the memory of the rank that writes
    them.
    """
    entries = (
        config.rounds * (4 * config.clients + 1000)
        + 24 * (config.new_updates + 1) * config.new_clients
    )
    needed, there = entries * len(config.seeds or (0,)), memory.usable()
    if needed > there:
        raise UserError(
            f"--rounds {config.rounds} of --clients {config.clients} would make "
            f"{needed / 2**30:,.0f} GiB of results, "
            f"this machine has {there / 2**30:,.0f}"
        )


def _check_synthetic(config: RunConfig, workers: int) -> None:
    """Refuse synthetic data that would fill the host's memory; a GPU has its own, and
    says itself when it is full.
    """
    if config.dataset != "synthetic" or (
        config.device != "cpu" and Path("/dev/nvidiactl").exists()
    ):
        return
    needed, there = synthetic_bytes(config, workers), memory.usable()
    if needed > there:
        raise UserError(
            f"--synthetic-shape {config.synthetic_shape}: a rank would need about "
            f"{needed / 2**30:,.0f} GiB, this "
            f"machine has {there / 2**30:,.0f}; use smaller images, fewer --clients, "
            "--train-per-client or "
            "--test-per-client"
        )


def synthetic_bytes(config: RunConfig, workers: int) -> int:
    """Estimate what a rank holds at least: labels, prototypes, its clients' images, and
    rows of an mlp.
    """
    pixels, number = prod(config.shape), 8 if config.precision == "fp64" else 4
    clients, seeds = config.clients + config.new_clients, len(config.seeds or (0,))
    samples = clients * (config.train_per_client + config.test_per_client)
    shared_out = samples + clients * config.test_per_client  # the global test set, too
    images = -(-shared_out // workers) * pixels * number * seeds
    making = pixels * 8 * 3  # hashes of one image, of which numbers are made
    rows = (
        4 * 64 * pixels * number if config.network() == "mlp" else 0
    )  # before and after, gradient, momentum
    return (
        images
        + making
        + rows
        + 2 * config.synthetic_classes * pixels * 4
        + 3 * 8 * samples
    )


def num_new_classes(classes: int, share: float) -> int:
    """Classes that new clients alone hold."""
    return round(share * classes)


def _check_classes(config: RunConfig, data: DatasetInfo) -> None:
    new = num_new_classes(data.classes, config.new_classes)
    if config.new_classes and not 0 < new < data.classes:
        raise UserError(
            f"--new-classes {config.new_classes} of {data.classes} classes leaves none "
            "to one of the two"
        )
    for whose, classes in (
        ("", data.classes - new),
        (" for new clients", new or data.classes),
    ):
        if config.partition == "sharding" and config.classes_per_client > classes:
            left = (
                f" has {data.classes} classes"
                if not new
                else f" leaves {classes} of {data.classes} classes{whose}"
            )
            raise UserError(
                f"--classes-per-client {config.classes_per_client}, but {config.dataset}{left}"
            )


def expected_malicious(tolerance: float, uploads: int) -> int:
    """f of the robust rules, among so many uploads."""
    return int(
        tolerance * uploads + 1e-9
    )  # 0.29 of 100 are 29, whatever floats make of it


def idle(settings: Settings) -> dict[str, str]:
    """Find options that would be without effect, and what each of them needs; a value
    that means off needs nothing.
    """
    config, options = settings.config, settings.options
    values = {**dict(config), **dict(options)}
    found = {}
    for option, wanted, on in (
        *_switches(config),
        *options.switches(config),
        *_training_switches(config, options),
    ):
        field = type(options).model_fields.get(option) or RunConfig.model_fields[option]
        off = not field.default and values[option] == field.default
        if not on and not off:
            found[option] = wanted
    return found


def _switches(config: RunConfig) -> Iterable[Switch]:
    attacked, robust = (
        config.attack != "none",
        config.aggregation in ("trimmed-mean", "krum", "multi-krum"),
    )
    own_size = config.partition == "dominant" or config.dataset == "synthetic"
    new = config.new_clients > 0
    yield Switch("attackers", "--attack ipm", attacked)
    yield Switch(
        "attack_strength",
        "--attack ipm, sign-flip or noise",
        config.attack in ("ipm", "sign-flip", "noise"),
    )
    yield Switch("tolerance", "--aggregation trimmed-mean", robust)
    yield Switch(
        "krum_keep", "--aggregation multi-krum", config.aggregation == "multi-krum"
    )
    yield Switch("supplement_below", "--supplement", config.supplement)
    yield Switch("supplement_share", "--supplement", config.supplement)
    yield Switch(
        "stop_at_target", "--target-accuracy 80", config.target_accuracy is not None
    )
    for option in ("new_classes", "new_updates", "join_rounds", "new_starts"):
        yield Switch(option, "--new-clients 10", new)
    yield Switch("alpha", "--partition dirichlet", config.partition == "dirichlet")
    yield Switch(
        "classes_per_client", "--partition sharding", config.partition == "sharding"
    )
    yield Switch(
        "uniform_share", "--partition dominant", config.partition == "dominant"
    )
    for option in ("train_per_client", "test_per_client"):
        yield Switch(option, "--partition dominant or --dataset synthetic", own_size)
    for option in ("synthetic_shape", "synthetic_classes"):
        yield Switch(option, "--dataset synthetic", config.dataset == "synthetic")
    yield Switch("overwrite", "--out", config.out is not None)
    yield Switch("lr_decay", "--rounds 2 or more", config.rounds > 1 or new)


def _training_switches(config: RunConfig, options: Options) -> Iterable[Switch]:
    """Name options of local training in whose place the method has its own."""
    for option, own in options.trains_by.items():
        asks = (
            option == "batch_size" and config.supplement and not config.supplement_below
        )
        wanted = f"--new-clients 10: method {config.method} trains by {flag_of(own)}"
        yield Switch(option, wanted, config.new_clients > 0 or asks)


def _check_switches(settings: Settings) -> None:
    """Refuses options that would be without effect, because what they are about was not
    asked for.
    """
    for option, wanted in idle(settings).items():
        if option in settings.asked:
            raise UserError(f"{flag_of(option)} changes nothing without {wanted}")


def _check_attacks(settings: Settings) -> None:
    config = settings.config
    if config.attack not in ATTACKS:
        raise unknown("attack", config.attack, ATTACKS)
    if config.attackers > 1 and config.attackers % 1:
        raise UserError(
            f"--attackers {config.attackers} is neither a share below 1 nor a whole number"
        )
    if config.num_attackers > config.clients:
        raise UserError(
            f"--attackers {config.num_attackers}, but there are {count(config.clients, 'client')}"
        )
    if config.attack != "none" and not config.num_attackers:
        raise UserError(
            f"--attackers {config.attackers} of {count(config.clients, 'client')} are "
            "none; use --attackers 1"
        )
    if config.attack in NEED_BENIGN and config.num_attackers == config.clients:
        raise UserError(
            f"--attack {config.attack} needs benign clients, and all {config.clients} "
            "are attackers; "
            "use fewer --attackers, or --attack sign-flip"
        )
    if config.attack not in ("none", "label-flip") and not settings.options.uploads:
        raise UserError(
            f"--attack {config.attack}, but clients of method {config.method} upload nothing"
        )


def _check_aggregation(settings: Settings) -> None:
    config, uploads = settings.config, settings.config.cohort_size
    if config.aggregation != "mean" and not settings.options.averages:
        raise UserError(
            f"--aggregation {config.aggregation}, but method {config.method} takes no "
            "mean of uploads"
        )
    if config.krum_keep > uploads:
        raise UserError(
            f"--krum-keep {config.krum_keep}, but a round has {count(uploads, 'upload')}"
        )
    malicious = expected_malicious(config.tolerance, uploads)
    if config.aggregation == "trimmed-mean" and 2 * malicious >= uploads:
        raise UserError(
            f"--tolerance {config.tolerance} of {count(uploads, 'upload')} makes "
            "trimmed-mean drop all of them; "
            "lower it, or use --aggregation median"
        )
    least = 2 * malicious + 3
    if "krum" in config.aggregation and uploads < least:
        raise UserError(
            f"{config.aggregation} needs at least {least} uploads to bear --tolerance "
            f"{config.tolerance}, "
            f"a round has {uploads}; sample more clients or lower it"
        )


def _check_ranks(settings: Settings, launch: Launch) -> None:
    config, servers = settings.config, settings.config.server_ranks
    if servers and not settings.options.has_server:
        raise UserError(
            f"--server-ranks {servers}, but method {config.method} has no model on the server"
        )
    if servers >= launch.size and servers:
        raise UserError(
            f"--server-ranks {servers} leaves no worker among {count(launch.size, 'rank')}; "
            f"start more, as in mpirun -n {servers + 1}"
        )
    workers = launch.size - servers
    for flag, clients in {
        "--clients": config.clients,
        "--new-clients": config.new_clients or workers,
    }.items():
        if clients < workers:
            raise UserError(
                f"{flag} {clients} on {workers} ranks; use {flag} {workers} or more, or fewer ranks"
            )
    settings.options.check_ranks(servers or launch.size)


def check_unchanged(
    folder: Path, had: Mapping[str, Any], wanted: Mapping[str, Any]
) -> None:
    """Refuses to mix figures of different options in one folder of results."""
    for name, value in wanted.items():
        before = had.get(name, value)
        left_open = name in CHOSEN_LATER and value == CHOSEN_LATER[name]
        if before != value and name not in ANYWHERE and not left_open:
            raise UserError(
                f"{folder} was run with {name} {before}, not {value}; name another --out"
            )


def _check_number(value: Any, source: str, *, whole: int) -> None:
    """Refuse numbers that no run can compute with."""
    least, largest = FLOATS
    if isinstance(value, int) and abs(value) > whole:
        raise UserError(f"{source}: must be at most {whole:,}")
    if isinstance(value, float) and value and not least <= abs(value) <= largest:
        raise UserError(
            f"{source}: must be 0 or between {least:.2g} and {largest:.2g}, as float32 has them"
        )


def _validated(
    model: type[T], values: Mapping[str, Any], sources: Mapping[str, str]
) -> T:
    try:
        found = model.model_validate(values)
        for name in values:
            _check_number(
                getattr(found, name),
                sources.get(name, name),
                whole=MOST if "seed" not in name else 2**63,
            )
        return found
    except ValidationError as failure:
        error = failure.errors()[0]
        name = str(error["loc"][0]) if error["loc"] else ""
        if error["type"] == "string_pattern_mismatch":
            usual = model.model_fields[name].default
            raise UserError(
                f"{sources.get(name, name)}: must look like {usual}, got {error['input']!r}"
            ) from None
        message = (
            error["msg"]
            .replace("Input should be", "must be")
            .replace("Value error, ", "")
        )
        raise UserError(
            f"{sources.get(name, name)}: {message}, got {error['input']!r}"
        ) from None

"""Options of the run itself: its method, length, clients, seeds and folder; and of
clients that join after the last round.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from hpcfed.errors import UserError, count
from hpcfed.options.declare import LEFT_OUT, Need, OptionGroup, option
from hpcfed.options.first_weights import kept_weights
from hpcfed.options.traits import MethodTraits

# Seeds as a user writes them: `0..4`, `0,3,7`, or a list in a TOML file.

MOST_SEEDS = 256
"""The most seeds that one run advances together; each has its own thread."""

MOST_DIGITS = 100
"""The most digits of a seed that we parse: Python is slow on very long numbers."""


def read_seeds(text: Any) -> Any:
    """Parse a range or a list of seeds; leave a list from a TOML file to the type."""
    if not isinstance(text, str):
        return text
    # A range includes both ends: 0..4 has five seeds.
    is_range = ".." in text
    words = text.split(".." if is_range else ",")
    numeric = all(word.strip().isdecimal() for word in words)
    if not numeric or (is_range and len(words) != 2):
        raise ValueError("must be a range such as 0..4 or a list such as 0,3,7")
    if max(map(len, words)) > MOST_DIGITS:
        raise ValueError("must be seeds below 2^63")
    numbers = [int(word) for word in words]
    return _range(*numbers) if is_range else numbers


def _range(first: int, last: int) -> list[int]:
    if first > last:
        raise ValueError(f"must count upwards, as in {last}..{first}")
    # Do not build a huge range: `check_seeds` refuses even one seed too many.
    last = min(last, first + MOST_SEEDS)
    return list(range(first, last + 1))


def check_seeds(seeds: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Refuse an empty list, too many seeds, and a repeated seed."""
    if seeds is None:
        return None
    if not 0 < len(seeds) <= MOST_SEEDS:
        raise ValueError(f"must be 1 to {MOST_SEEDS} seeds")
    if len(set(seeds)) < len(seeds):
        raise ValueError("must name every seed once")
    return seeds


Seed = Annotated[int, Field(ge=0, lt=2**63)]
Seeds = Annotated[
    tuple[Seed, ...] | None, BeforeValidator(read_seeds), AfterValidator(check_seeds)
]


def seed_folder(folder: Path, seed: int) -> Path:
    """Return the folder of one of several seeds."""
    return folder / f"seed-{seed}"


SAMPLED = Need(
    "a --participation below 1", lambda run: bool(run.cohort_size < run.clients)
)
"""The need of options that act on clients outside a round's cohort."""


def _rounds_to_stop(run: Any) -> int:
    """Return the fewest rounds of a run that --early-stop can end."""
    # The first evaluation is always the best so far, and the last one ends the run
    # anyway.
    return int((run.early_stop + 1) * run.evaluate_every + 1)


class RunOptions(OptionGroup):
    title: ClassVar[str] = "the run"

    # Not a Literal: any file may be a method.
    method: str = option(
        "fedavg",
        "the method; `hpcfed list` names all; or FILE.py with your own",
        names_code="method",
        also="algorithm algo strategy aggregator m federated_optimizer "
        "gradient_policy fl_algorithm",
    )
    rounds: int = option(
        20,
        "communication rounds",
        ge=1,
        told="beside the data set",
        beside_resume=True,
        calibration=LEFT_OUT,
        in_every_record=True,
        also="num_rounds n_rounds number_of_rounds global_rounds comm_rounds "
        "communication_rounds global_epochs iterations T num_server_rounds "
        "server_rounds comm_round central_num_iterations num_iterations "
        "max_rounds total_rounds federated_rounds",
    )
    clients: int = option(
        20,
        "simulated clients",
        ge=1,
        problem=True,
        calibration=LEFT_OUT,
        in_every_record=True,
        also="num_clients n_clients number_of_clients num_users users nodes n N K "
        "client_num_in_total num_supernodes num_parties total_clients "
        "min_available_clients",
    )
    participation: float = option(
        1.0,
        "share of the clients sampled in a round; at least one is",
        gt=0,
        le=1,
        stackable=True,
        calibration=LEFT_OUT,
        also="fraction fraction_fit frac sample_rate sampling_rate join_ratio "
        "client_fraction client_frac participation_rate C fraction_train "
        "train_fraction participation_ratio selection_ratio",
        needs=Need("leaving --cohort out", lambda run: run.cohort is None),
    )
    cohort: int | None = option(
        None,
        "clients sampled in a round, in place of --participation",
        ge=0,
        stackable=True,
        calibration=LEFT_OUT,
        also="cohort_size clients_per_round num_sampled sampled_clients "
        "min_fit_clients client_num_per_round num_participants participants "
        "num_selected_clients",
    )
    sampling: Literal["fixed", "poisson"] = option(
        "fixed",
        "who is sampled in a round: fixed, the cohort's size without replacement; "
        "poisson, each client by itself, so that their number varies",
    )
    # `seed` and `seeds` exclude each other. Of several seeds, each record has `seed`.
    seed: Seed = option(
        0,
        "seed of every random stream",
        changes="draws",
        stackable=True,
        calibration=LEFT_OUT,
        also="random_seed rng_seed manual_seed s seed_value",
    )
    seeds: Seeds = option(
        None,
        "several seeds at once, as in 0..4 or 0,3,7; results go to OUT/seed-N",
        changes="draws",
        stackable=True,
        calibration=LEFT_OUT,
        also="repeats num_seeds trials times",
    )
    # Without --out, the root rank names the folder for all ranks when the run starts.
    out: Path | None = option(
        None,
        "folder for the results (default: runs/METHOD-DATASET-TIME)",
        changes="nothing",
        study_sets=True,
        calibration=LEFT_OUT,
        also="output output_dir out_dir outdir outputs save save_dir save_path "
        "log_dir logdir folder o results_dir result_dir output_path log_path "
        "checkpoint_dir",
    )
    overwrite: bool = option(
        False,
        "replace what earlier runs have written to --out",
        changes="nothing",
        beside_resume=True,
        from_record=False,
        study_sets=True,
        calibration=LEFT_OUT,
        also="force exist_ok",
        needs=Need("--out", lambda run: run.out is not None),
    )
    init: Path | None = option(
        None,
        "weights to start from: the folder of a run with a global model, a file with a "
        "tensor for each name (.npz, .safetensors), or a folder of PEFT's adapters",
        also="init_from pretrained load_model initial_weights init_model "
        "load_from model_path",
    )
    # `cli.resume` turns the next three into the settings of the existing run.
    resume: Path | None = option(
        None,
        "continue the run in this folder from its last checkpoint, or make a "
        "complete run longer with more --rounds; options that change no number may be "
        "given anew, such as --device; --overwrite starts anew if there is no checkpoint",
        changes="nothing",
        study_sets=True,
        calibration=LEFT_OUT,
        also="continue restart from_checkpoint load_checkpoint resume_from",
    )
    accept_changes: bool = option(
        False,
        "with --resume: go on although a file of yours, such as that of the method, "
        "has changed since the run began",
        changes="nothing",
        beside_resume=True,
        from_record=False,
        needs=Need("--resume", lambda run: run.resume is not None),
    )
    requeue: bool = option(
        False,
        "for a job that Slurm may requeue: start, or continue what this same job has "
        "written to --out (default: runs/slurm-JOB)",
        changes="nothing",
        beside_resume=True,
        from_record=False,
        study_sets=True,
        calibration=LEFT_OUT,
    )
    # Above 1, because 0.8 can only be a mistake for 80.
    target_accuracy: float | None = option(
        None,
        "tell when this accuracy in per cent, as in 80, is first reached, and from when "
        "on it is held, by the global model, or by the clients' mean if there is no "
        "global model",
        gt=1,
        le=100,
        calibration=LEFT_OUT,
        also="target target_acc",
    )
    stop_at_target: bool = option(
        False,
        "end the run in the round that reaches --target-accuracy",
        calibration=LEFT_OUT,
        also="target_stop",
        needs=Need("--target-accuracy 80", lambda run: run.target_accuracy is not None),
    )
    early_stop: int | None = option(
        None,
        "end the run after this many evaluations in a row without a better accuracy "
        "of the clients' mean, or of the global model if there is no mean; by the "
        "global model's loss if the task has no accuracy",
        ge=0,
        calibration=LEFT_OUT,
        also="early_stopping patience es_patience early_stop_patience",
        needs=Need(
            lambda run: f"--rounds {_rounds_to_stop(run)} or more",
            lambda run: run.early_stop is None or run.rounds >= _rounds_to_stop(run),
        ),
    )

    @property
    def cohort_size(self) -> int:
        """The number of clients sampled in a round."""
        return self.cohort_among(self.clients)

    def cohort_among(self, clients: int) -> int:
        """Return the number of clients that a round samples out of `clients`."""
        if self.cohort is not None:
            return min(self.cohort, clients)
        # max(C·K, 1) of McMahan et al. 2017, Algorithm 1.
        return max(1, round(self.participation * clients))

    @property
    def first_weights(self) -> Path | None:
        """Where the weights of --init are. A resumed run has a copy, so that it goes on
        with the same, whatever has become of the user's file.
        """
        if self.init is None or self.resume is None:
            return self.init
        return kept_weights(self.resume) or self.init

    @property
    def num_seeds(self) -> int:
        """The number of seeds that this run advances together."""
        return 1 if self.seeds is None else len(self.seeds)


def check_run(config: RunOptions, method: MethodTraits) -> None:
    """Refuse too large a cohort, and early stops with a server."""
    if config.cohort is not None and config.cohort > config.clients:
        raise UserError(
            f"--cohort {config.cohort}, but there are {count(config.clients, 'client')}"
        )
    if not method.has_server:
        return
    for flag, on in (
        ("--stop-at-target", config.stop_at_target),
        ("--early-stop", config.early_stop is not None),
    ):
        if on:
            raise UserError(
                f"{flag}: the server of method {config.method} learns only after the "
                "last round"
            )


NEWCOMERS = Need("--new-clients 10", lambda run: run.new_clients > 0)
"""What turns on all options of new clients."""
_ALONE = Need("leaving --new-rounds out", lambda run: run.new_rounds == 0)


class NewcomerOptions(RunOptions):
    title: ClassVar[str] = "new clients"

    # 0 is an amount: no clients join.
    new_clients: int = option(
        0,
        "clients that join after the last round, to see how fast they catch up",
        ge=0,
        calibration=LEFT_OUT,
        also="novel_clients unseen_clients num_new_clients",
    )
    new_updates: int = option(
        5,
        "local updates, each of --epochs, that new clients make",
        ge=1,
        calibration=LEFT_OUT,
        needs=(_ALONE, NEWCOMERS),
    )
    new_rounds: int = option(
        0,
        "rounds of the method among new clients, in place of local updates on their "
        "own; each of the first --join-rounds is made by the clients that join in "
        "it, later ones by a sample of all; 0: none",
        ge=0,
        calibration=LEFT_OUT,
        needs=NEWCOMERS,
    )
    join_rounds: int = option(
        1,
        "updates or rounds over which new clients join, equally many in each",
        ge=1,
        calibration=LEFT_OUT,
        needs=NEWCOMERS,
    )
    new_starts: Literal["all", "method"] = option(
        "all",
        "where new clients start: as the method says, or (all) from a random row (also "
        "guided, where the method guides) and from the global model as well",
        calibration=LEFT_OUT,
        needs=(_ALONE, NEWCOMERS),
    )


def check_newcomers(config: NewcomerOptions, method: MethodTraits) -> None:
    """Refuse too many --join-rounds, and those that a server cannot guide."""
    # Without new clients, `check_switches` says what --join-rounds needs.
    joining = config.new_clients or config.join_rounds
    length, flag = config.new_updates, "--new-updates"
    if config.new_rounds:
        length, flag = config.new_rounds, "--new-rounds"
    if config.join_rounds > min(joining, length):
        raise UserError(
            f"--join-rounds {config.join_rounds} is more than --new-clients "
            f"{config.new_clients} or {flag} {length}"
        )
    if config.join_rounds > 1 and method.has_server:
        raise UserError(
            f"--join-rounds: the server of method {config.method} guides all new "
            "clients at once"
        )

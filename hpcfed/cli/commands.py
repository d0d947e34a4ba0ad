"""The commands. Nothing heavy is imported before the command line has been understood."""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from errno import EIO, ENAMETOOLONG, ENOSPC
from io import TextIOWrapper
from math import inf
from pathlib import Path
from re import fullmatch
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo

from hpcfed import __version__, methods
from hpcfed.attacks import ATTACKS
from hpcfed.config import RunConfig, Settings, check, check_text, read_toml, resolve
from hpcfed.data import DATASETS, PARTITIONS
from hpcfed.errors import (
    UserError,
    did_you_mean,
    no_checkpoint,
    remark,
    tell,
    unknown,
    unless_full,
)
from hpcfed.models import MODELS
from hpcfed.runtime.launcher import launched, leave, telling_a_good_end

_EXAMPLES = {
    "run": """
  hpcfed run --method fedavg-ft --clients 20 --rounds 10      alone, on the embedded digits
  mpirun -n 4 python -m hpcfed run my.toml --clients 100      options from a file; flags win
  srun --mpi=pmix -n 16 python -m hpcfed run --dataset cifar10 --data-root /data --out runs/first
  mpirun -n 3 python -m hpcfed run --method pfedgpa --server-ranks 1 --server small
  hpcfed run --seeds 0..4 --out runs/five                     five seeds at once, one folder each
  hpcfed run --method genfed --attack ipm --target-accuracy 80  attackers among the clients; when 80 % are reached""",
    "show": """
  hpcfed show runs/first                                      read a run back (--json for programs)""",
    "profile": """
  hpcfed profile --method pfedgpa --server small --bank-rounds 5 --autoencoder-samples 2000 --denoiser-samples 2000
  mpirun -n 3 python -m hpcfed profile my.toml --server-ranks 1 --profile-rounds 5""",
    "study": """
  hpcfed study benchmarks/studies/strong.toml --dry-run       a sweep: its points, their commands, what they cost
  hpcfed study benchmarks/studies/strong.toml --only 'ranks=2*'
  hpcfed study benchmarks/studies/strong.toml --submit -- --partition=gpu --time=2:00:00""",
    "report": """
  hpcfed report runs/strong --out strong.html                 what runs and studies have found, on one page
  hpcfed report runs/first runs/second --csv rounds.csv       two runs beside each other, and their rounds as a table
  hpcfed report runs/first --unfinished                       how far a long run has come""",
    "attack": """
  hpcfed attack idlg --out stolen.png                         images that a server reconstructs from uploads
  hpcfed attack idlg --methods fedavg,genefl --dataset cifar10 --data-root /data --steps 100""",
    "list": """
  hpcfed list                                                 methods, data sets, models, partitions, attacks""",
}
"""By command; the first of each is in the help of all."""
_COMMANDS = """commands:
  run      one run, or several seeds of it
  show     what is in a run, or in its seeds
  profile  a run, and where its time goes
  study    a sweep over any options, here or on Slurm
  report   one page of runs and studies, and their figures for other programs
  attack   what a server can steal of clients' images
  list     methods, data sets, models, partitions, attacks

"""
MACHINE = ("device", "backend")
BESIDE_RESUME = (*MACHINE, "overwrite")
"""Options that may stand beside --resume."""
_GROUPS = {
    "run": "the run",
    "data": "data and how it is spread over clients",
    "training": "model and local training",
    "attacks": "malicious clients, and how the server aggregates",
    "machine": "machine",
    "method": "options of method {method}",
    "server": "the server's model, of method {method}",
}


class _Help(argparse.HelpFormatter):
    """Keeps the lines of examples, and fills all other text."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return (
            text if "\n  hpcfed " in text else super()._fill_text(text, width, indent)
        )


class _Parser(argparse.ArgumentParser):
    """Of one command, with its examples; reports a mistake as one line."""

    def __init__(self, command: str, examples: str = "", **options: Any) -> None:
        epilog = examples or f"examples:{_EXAMPLES[command]}"
        super().__init__(
            f"hpcfed {command}".strip(),
            epilog=epilog,
            formatter_class=_Help,
            allow_abbrev=False,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `hpcfed` and `python -m hpcfed`; ends the process with 0, 1
    (failed) or 2 (user's mistake).
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(
            errors="replace"
        )  # where a locale has no ← and no ö, as stderr does already
    try:
        with telling_a_good_end():
            _dispatch(list(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        launch = launched()
        tell(error, launch.rank)
        leave(launch, 2)
    except KeyboardInterrupt:
        remark("hpcfed: interrupted")
        sys.exit(130)
    except (
        BrokenPipeError
    ):  # the reader of our output has gone, as in `hpcfed show … | head`
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        if (
            error.errno == ENAMETOOLONG and error.filename is not None
        ):  # of a path on the command line
            tell(UserError(f"{error.filename}: {error.strerror}"), launched().rank)
            leave(launched(), 2)
        if error.filename is not None or error.errno not in (ENOSPC, EIO):
            raise
        remark(f"hpcfed: cannot write what is to be read: {error.strerror}")
        sys.exit(1)


def _dispatch(arguments: list[str]) -> None:
    commands = {
        "run": _run,
        "show": _show,
        "profile": _profile,
        "study": _study,
        "report": _report,
        "attack": _attack,
        "list": _list,
    }
    first = [
        lines if name == "run" else lines.split("\n")[1]
        for name, lines in _EXAMPLES.items()
    ]
    parser = _Parser(
        "",
        f"{_COMMANDS}examples:" + "\n".join(first),
        description="Benchmarks of federated learning on clusters: hundreds of clients as rows of one matrix.",
    )
    parser.add_argument("--version", action="version", version=f"hpcfed {__version__}")
    parser.add_argument(
        "command", nargs="?", metavar="COMMAND", help="COMMAND --help says more"
    )
    if not arguments or arguments[0].startswith("-"):
        parser.parse_args(arguments)
        parser.print_help()
        return
    name, *rest = arguments
    if name not in commands:
        raise unknown("command", name, commands)
    commands[name](rest)


def _run(arguments: list[str]) -> None:
    settings = parse_run(arguments)
    if settings.config.requeue:
        settings = _requeued(settings)
    check(settings, launched())
    if settings.config.resume is not None and _complete(settings.config.resume):
        if not launched().rank:
            remark(
                f"hpcfed: {settings.config.resume} is complete; there is nothing to go on with"
            )
        return
    from hpcfed.experiment.run import run

    folder = run(settings)
    if folder is not None:
        with unless_full(f"the run is complete: hpcfed show {folder}"):
            _print_run(folder)


def parse_run(arguments: list[str]) -> Settings:
    """Settings from a TOML file and flags; flags win."""
    path, method = _peek(arguments)
    if path is not None:
        check_text(str(path), "CONFIG.toml")  # the record keeps the command line
    from_file = {} if path is None else read_toml(path)
    method = method or from_file.get("method", RunConfig.model_fields["method"].default)
    method_options = methods.load(str(method)).Options
    flags, parser = _run_parser(method_options.model_fields, str(method))
    known, strange = parser.parse_known_args(arguments)
    if strange:
        raise UserError(_unknown_flag(strange[0], flags))
    given = {name: value for name, value in vars(known).items() if name != "config"}
    if "resume" in given:
        if set(given) - {"resume", "requeue", *BESIDE_RESUME} or path is not None:
            raise UserError(
                "--resume takes everything from the run that it goes on with; give it "
                "no other option "
                "than --device, --backend, --overwrite and --requeue"
            )
        if not given["resume"]:
            raise UserError("--resume: must be a path, got nothing")
        check_text(given["resume"], "--resume")
        return _resumed(
            Path(given["resume"]),
            {name: given[name] for name in BESIDE_RESUME if name in given},
        )
    for name in from_file:
        if name not in flags and (owners := _owners(name)):
            raise UserError(
                f"{path}: {name} is an option of method {', '.join(owners)}, and the "
                f"method is {method}"
            )
    sources = {name: f"{path}: {name}" for name in from_file} | {
        name: f"{flags[name]} {given[name]}" for name in given
    }
    return resolve(
        {**from_file, **given}, sources, method_options, ranks=launched().size
    )


def _resumed(folder: Path, beside: Mapping[str, Any]) -> Settings:
    """The settings of a run that is there; of all its seeds, if it has several.

    `beside` are options that were given, too; the machine may be another one now.
    """
    from hpcfed.experiment.stored import read_run
    from hpcfed.record import checkpoints
    from hpcfed.record.folder import (
        RECORD,
        check_one_kind,
        check_plain,
        holds_run,
        seeds,
    )
    from hpcfed.record.sandbox import try_out

    check_plain(folder)
    check_one_kind(folder)
    own = [seed for seed in seeds(folder) if holds_run(folder / f"seed-{seed}")]
    every = [] if (folder / RECORD).exists() else own
    left = [
        seed for seed in every if not _complete(folder / f"seed-{seed}")
    ] or every  # others are left as they are
    runs = [folder / f"seed-{seed}" for seed in left] or [folder]
    files = [path for run in runs for path in checkpoints.recorded(run)]
    first = next(path for path in files if path.name == RECORD)
    if not first.is_file():
        raise UserError(f"--resume {folder}: there is no run")
    try_out(path for path in files if path.is_file())
    record = read_run(first.parent)
    lost = record.rounds_done if not all(checkpoints.exist(run) for run in runs) else 0
    if lost and record.status != "complete" and not beside.get("overwrite"):
        raise UserError(no_checkpoint(folder, lost))
    values = {name: value for name, value in record.config.items() if value is not None}
    # Nothing is fetched, or written elsewhere, because a folder says so that was handed
    # in.
    values |= {
        "out": str(folder),
        "resume": str(folder),
        "overwrite": False,
        "requeue": False,
        "download": False,
    }
    values |= beside
    if left:
        del values["seed"]
        values["seeds"] = ",".join(map(str, left))
    sources = {name: f"{folder}: {name}" for name in values}
    return resolve(
        values, sources, methods.load(str(values.get("method"))).Options, shared=values
    )


def _requeued(settings: Settings) -> Settings:
    """Settings of a job that Slurm may requeue: it begins, or goes on in a folder that
    it has begun itself.

    A folder that another has begun is left to `check`, which refuses it.
    """
    from hpcfed.record import checkpoints
    from hpcfed.record.folder import runs
    from hpcfed.record.job import begun_by, this_job, was_requeued

    config, job = settings.config, this_job()
    if job is None:
        raise UserError(
            "--requeue is for jobs of Slurm, and there is no SLURM_JOB_ID; leave it out"
        )
    if config.resume is not None:
        return settings
    out = config.out or Path("runs") / f"slurm-{job.split()[0]}"
    ours = was_requeued() and begun_by(out) == job
    if ours and any(checkpoints.exist(run) or _complete(run) for run in runs(out)):
        return _resumed(
            out, {"overwrite": True}
        )  # what the job has begun itself, it may begin anew
    changes = {"out": out, "overwrite": config.overwrite or ours}
    return replace(settings, config=config.model_copy(update=changes))


def _complete(folder: Path) -> bool:
    """Whether a run, or every seed of it, has come to its end; one whose record is
    damaged has not.
    """
    from hpcfed.experiment.stored import is_complete
    from hpcfed.record.folder import RECORD, runs
    from hpcfed.record.sandbox import try_out

    try:
        try_out(run / RECORD for run in runs(folder) if (run / RECORD).is_file())
    except UserError:
        return False
    return is_complete(folder)


def _peek(arguments: list[str]) -> tuple[Path | None, str | None]:
    """The config file and the method, which decide what other options there are."""
    flags, parser = _run_parser(_all_method_fields(), "", add_help=False)
    known, strange = parser.parse_known_args(
        [word for word in arguments if word not in ("-h", "--help")]
    )
    if strange:
        raise UserError(_unknown_flag(strange[0], flags))
    return (None if known.config is None else Path(known.config)), getattr(
        known, "method", None
    )


def _all_method_fields() -> dict[str, FieldInfo]:
    fields: dict[str, FieldInfo] = {}
    for own in methods.options().values():
        fields |= own
    return fields


def _run_parser(
    method_fields: Mapping[str, FieldInfo], method: str, *, add_help: bool = True
) -> tuple[dict[str, str], argparse.ArgumentParser]:
    """A flag for every option; values stay as typed, the config's types judge them."""
    parser = _Parser(
        "run",
        usage="hpcfed run [CONFIG.toml] [options]",
        description="One run: alone, or started on every rank by mpirun or srun. Options of other methods: "
        "hpcfed run --method NAME --help.",
        add_help=add_help,
    )
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG.toml",
        help="options as keys, e.g. rounds = 10; flags win",
    )
    fields = {**RunConfig.model_fields, **method_fields}
    groups: dict[str, Any] = {}
    flags = {}
    for name, field in fields.items():
        title = _GROUPS[_group(field)].format(method=method)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        flags[name] = f"--{name.replace('_', '-')}"
        _add_flag(groups[title], flags[name], name, field)
    return flags, parser


def _group(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    return str(extra["group"])


def _add_flag(group: Any, flag: str, name: str, field: FieldInfo) -> None:
    text = str(field.description).replace("%", "%%")
    if field.annotation is bool:
        group.add_argument(
            flag,
            dest=name,
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            help=text,
        )
        return
    if field.default is not None:
        text += f" (default: {field.default})"
    group.add_argument(
        flag, dest=name, default=argparse.SUPPRESS, metavar=_metavar(field), help=text
    )


def _metavar(field: FieldInfo) -> str:
    kind = field.annotation
    if get_origin(kind) is Literal:
        return "|".join(str(choice) for choice in get_args(kind))
    return {
        int: "N",
        float: "X",
        float | None: "X",
        str: "NAME",
        Path | None: "PATH",
    }.get(kind, "LIST")  # type: ignore[arg-type]


def _unknown_flag(word: str, flags: Mapping[str, str]) -> str:
    flag = word.partition("=")[0]
    if not flag.startswith("-"):
        return f"unexpected argument '{word}'; options start with --, and there is one CONFIG.toml"
    name = flag.lstrip("-").removeprefix("no-").replace("-", "_")
    if owners := _owners(name):
        return f"{flag} is an option of method {', '.join(owners)}; add --method {owners[0]}"
    return f"unknown option {flag}{did_you_mean(flag, flags.values())}"


def _owners(option: str) -> list[str]:
    """Methods that have it."""
    return [method for method, own in methods.options().items() if option in own]


def _show(arguments: list[str]) -> None:
    parser = _Parser("show", description="What is in a run, or in the seeds of one.")
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="the folder of a run, or of its seeds, as given by --out",
    )
    parser.add_argument(
        "--json", action="store_true", help="everything as JSON, for programs"
    )
    options = parser.parse_args(arguments)
    from hpcfed.record.sandbox import try_out

    try_out(
        path
        for pattern in ("run.h5", "seed-*/run.h5")
        for path in options.folder.glob(pattern)
        if path.is_file()
    )
    if options.json:
        from hpcfed.experiment.stored import read_run, read_seeds

        seeds = [record.summary() for record in read_seeds(options.folder)]
        content = {"seeds": seeds} if seeds else read_run(options.folder).summary()
        print(json.dumps(content, indent=1, allow_nan=False))
    else:
        _print_run(options.folder)


def _print_run(folder: Path) -> None:
    from hpcfed.experiment.stored import read_run, read_seeds
    from hpcfed.report.console import Output
    from hpcfed.report.show import show
    from hpcfed.report.show_seeds import show_seeds

    # Open MPI gives ranks a terminal of its own even when the user's output goes to a
    # file.
    console = Output(force_terminal=None if launched().alone else False)
    seeds = read_seeds(folder)
    if seeds:
        show_seeds(seeds, folder, console)
    else:
        show(read_run(folder), console)


def _profile(arguments: list[str]) -> None:
    parser = _Parser(
        "profile",
        usage="hpcfed profile [--profile-rounds N] [--profile-warmup N] [--nvtx] [CONFIG.toml] [options of hpcfed run]",
        description="A run, and where its time goes: phases of all ranks as a timeline, kernels, memory, and how near "
        "the device is to what it can do. All other options are those of hpcfed run.",
    )
    parser.add_argument("--profile-rounds", type=_positive, default=3, metavar="N", help="rounds, and steps of the "
                        "server's networks, that are looked at by kernel (default: 3)")  # fmt: skip
    parser.add_argument(
        "--profile-warmup",
        type=_positive,
        default=2,
        metavar="N",
        help="before them (default: 2)",
    )
    parser.add_argument(
        "--nvtx",
        action="store_true",
        help="phases as ranges for Nsight, in place of torch's profiler",
    )
    own, rest = parser.parse_known_args(arguments)
    settings = parse_run(rest)
    if settings.config.resume is not None:
        raise UserError(
            "--resume: a profile is of a run from its start; give it the run's options "
            "and another --out"
        )
    if settings.config.requeue:
        raise UserError(
            "--requeue: a profile has no checkpoints to go on from; leave it out"
        )
    if settings.config.seeds is not None:
        raise UserError("--seeds: a profile is of one seed; use --seed")
    check(settings, launched())
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "99"
    )  # torch's profiler would tell of missing GPUs; read when it loads
    from hpcfed.profile.command import profile

    profile(
        settings, warmup=own.profile_warmup, active=own.profile_rounds, nvtx=own.nvtx
    )


def _positive(text: str) -> int:
    if not fullmatch("0*[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(
            f"must be a whole number from 1 on, got '{text}'"
        )
    return int(text)


def _study(arguments: list[str]) -> None:
    own, extra = _split(arguments)
    parser = _Parser(
        "study",
        usage="hpcfed study STUDY.toml [options] [-- words for sbatch]",
        description="Runs every point of a sweep; those that are finished are skipped. Exit code 1: some have failed.",
    )
    parser.add_argument(
        "study",
        type=Path,
        metavar="STUDY.toml",
        help="what is swept; benchmarks/studies has examples",
    )
    parser.add_argument(
        "--out",
        type=_folder,
        help="folder of the study (default: runs/NAME of the file)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print every point, its command and what it may cost",
    )
    parser.add_argument(
        "--only",
        default="*",
        metavar="PATTERN",
        help="points whose names fit, as in 'ranks=4*'",
    )
    parser.add_argument(
        "--points",
        type=_numbers,
        metavar="LIST",
        help="points by number, as in 0,3; gathers nothing",
    )
    parser.add_argument(
        "--submit", action="store_true", help="hand the points to Slurm as arrays"
    )
    parser.add_argument(
        "--gather",
        action="store_true",
        help="run nothing, bring finished runs into study.h5",
    )
    parser.add_argument(
        "--launcher",
        choices=("auto", "mpirun", "srun"),
        default="auto",
        help="auto: srun in a Slurm job (default)",
    )
    options = parser.parse_args(own)
    if extra and not options.submit:
        raise UserError(
            f"unexpected argument '{extra[0]}'; words after -- are sbatch's, with --submit"
        )
    from hpcfed.study.command import study

    if study(options, extra):
        sys.exit(1)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Words before and after the first `--`."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def _folder(text: str) -> Path:
    check_text(text, "--out")
    return Path(text)


def _numbers(text: str) -> list[int]:
    if not fullmatch("[0-9]{1,9}(,[0-9]{1,9})*", text):
        raise argparse.ArgumentTypeError(
            f"must be numbers of points, as in 0,3, got '{text}'"
        )
    return [int(word) for word in text.split(",")]


def _report(arguments: list[str]) -> None:
    parser = _Parser(
        "report",
        description="One page of runs and studies. Exit code 1: something could not be read and was left out.",
    )
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="folders of runs or studies, or folders of such",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE.html",
        help="the page (default: report.html)",
    )
    parser.add_argument(
        "--unfinished",
        action="store_true",
        help="also runs at work, stopped or failed, with the rounds that they have; not a study's",
    )
    parser.add_argument(
        "--csv",
        type=Path,
        metavar="FILE.csv",
        help="also a line for every round of every run, with a column for each option that differs; and FILE-ranks.csv "
        "with the times of every rank",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also all figures of the page as JSON"
    )
    parser.add_argument(
        "--extrap",
        type=Path,
        metavar="FILE",
        help="also the times as Extra-P reads them (JSON Lines)",
    )
    options = parser.parse_args(arguments)
    from hpcfed.report.command import report

    if report(options):
        sys.exit(1)


def _attack(arguments: list[str]) -> None:
    parser = _Parser(
        "attack",
        description="What a malicious server can steal: images that iDLG reconstructs from what each method uploads.",
    )
    add = parser.add_argument
    add("name", metavar="idlg", help="the attack")
    add(
        "--methods",
        default="fedavg,fedavg-noise,parfed,fedlg,genefl",
        metavar="A,B",
        help="whose uploads (default: all, %(default)s)",
    )
    add(
        "--images",
        type=int,
        default=2,
        metavar="N",
        help="images to steal (default: 2)",
    )
    add(
        "--model",
        default="smooth",
        help="smooth (default: sigmoids, for which the attack works) or resnet18",
    )
    add(
        "--steps",
        type=int,
        default=300,
        metavar="N",
        help="outer steps of L-BFGS (default: 300)",
    )
    add(
        "--noise",
        type=float,
        default=0.001,
        metavar="X",
        help="variance of fedavg-noise's (default: 0.001)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of the network, the images and the noise (default: 0)",
    )
    add("--dataset", default="digits", help="whose test images (default: digits)")
    add(
        "--data-root",
        type=Path,
        help="folder of the data sets (default: $HPCFED_DATA, else ./data)",
    )
    add(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: a GPU where there is one (default)",
    )
    add(
        "--out",
        type=Path,
        metavar="PNG",
        help="a figure: originals above, what was stolen below",
    )
    options = parser.parse_args(arguments)
    if options.name != "idlg":
        raise unknown("attack of a server", options.name, ["idlg"])
    if options.model not in ("smooth", "resnet18"):
        raise unknown("model", options.model, ["smooth", "resnet18"])
    for flag in ("images", "steps"):
        if getattr(options, flag) < 1:
            raise UserError(f"--{flag} {getattr(options, flag)}: must be at least 1")
    if not 0 <= options.noise < inf or not 0 <= options.seed < 2**63:
        raise UserError("--noise must be a number from 0 on, and --seed one below 2^63")
    config = RunConfig(dataset=options.dataset, data_root=options.data_root)
    config.data()
    from hpcfed.cli.attack import steal

    steal(options, config)


def _list(arguments: list[str]) -> None:
    parser = _Parser(
        "list", description="Methods, data sets, models, partitions and attacks."
    )
    parser.parse_args(arguments)
    sections = {
        "methods": methods.summaries(),
        "data sets": {name: info.summary for name, info in DATASETS.items()},
        "models": {name: info.summary for name, info in MODELS.items()},
        "partitions": PARTITIONS,
        "attacks": ATTACKS,
    }
    for title, lines in sections.items():
        print(f"{title}:")
        for name, line in lines.items():
            print(f"  {name:16} {line}")

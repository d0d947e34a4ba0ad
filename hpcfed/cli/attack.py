"""`hpcfed attack`: what a malicious server can steal of clients' images."""

import argparse
from math import inf
from pathlib import Path

from hpcfed.cli.parser import CommandParser
from hpcfed.errors import UserError, unknown
from hpcfed.options import RunConfig

SUMMARY = "what a server can steal of clients' images"
EXAMPLES = """\
  hpcfed attack idlg --out stolen.png                         images reconstructed from uploads
  hpcfed attack idlg --methods fedavg,genefl --dataset cifar10 --data-root /data --steps 100
  hpcfed attack idlg --run runs/fedavg                        of a network that a run has trained"""


def command(arguments: list[str]) -> None:
    options = _parser().parse_args(arguments)
    _check(options)
    trained = None
    if options.run is not None:
        from hpcfed.attacks.trained import read_trained

        trained = read_trained(options.run, options.client, options.data_root)
        config = trained.config
    else:
        # The attack needs no run, only a data set by the name that a run would use.
        dataset = options.dataset or "digits"
        config = RunConfig(dataset=dataset, data_root=options.data_root)
    # This refuses an unknown or missing data set.
    data = config.data()
    if not data.side or data.task != "classification":
        raise UserError(f"--dataset {config.dataset} has no images to steal")
    from hpcfed.cli.idlg import steal

    steal(options, config, trained)


def _parser() -> CommandParser:
    parser = CommandParser(
        "attack",
        f"examples:\n{EXAMPLES}",
        description="Shows what a malicious server can steal: images that iDLG "
        "reconstructs from what each method uploads.",
    )
    # These are not options of a run; only --dataset and --data-root mean the same.
    add = parser.add_argument

    def number(flag: str, default: float, meaning: str) -> None:
        kind = type(default)
        metavar, told = "N" if kind is int else "X", f"{meaning} (default: {default})"
        add(flag, type=kind, default=default, metavar=metavar, help=told)

    add("name", metavar="idlg", help="the attack")
    add(
        "--methods",
        default="fedavg,fedavg-noise,parfed,fedlg,genefl",
        metavar="A,B",
        help="methods whose uploads are attacked (default: all, %(default)s)",
    )
    number("--images", 2, "images to steal")
    add(
        "--run",
        type=Path,
        metavar="FOLDER",
        help="attack the network that this run has trained, on its data set: its global "
        "model, or a client's row of its last snapshot",
    )
    add(
        "--client",
        type=int,
        metavar="N",
        help="with --run: the client whose row is attacked (default: the global model; "
        "where there is none, the first client that took part)",
    )
    add(
        "--model",
        metavar="NAME",
        help="smooth (default): sigmoids, for which the attack works; or resnet18",
    )
    number("--steps", 300, "outer steps of L-BFGS")
    number("--noise", 0.001, "variance of the noise of fedavg-noise")
    number("--seed", 0, "seed of the network, the images and the noise")
    add(
        "--dataset",
        metavar="NAME",
        help="data set whose test images are stolen (default: digits)",
    )
    add(
        "--data-root",
        type=Path,
        metavar="PATH",
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
        help="write a figure: originals above, reconstructions below",
    )
    return parser


def _check(options: argparse.Namespace) -> None:
    if options.name != "idlg":
        raise unknown("attack of a server", options.name, ["idlg"])
    if options.run is not None and (options.model or options.dataset):
        given = "--model" if options.model else "--dataset"
        raise UserError(f"{given} is that of the run with --run; leave it out")
    if options.client is not None and options.run is None:
        raise UserError("--client changes nothing without --run FOLDER")
    if options.model not in (None, "smooth", "resnet18"):
        raise unknown("model", options.model, ["smooth", "resnet18"])
    for flag in ("images", "steps"):
        number = getattr(options, flag)
        if number < 1:
            raise UserError(f"--{flag} {number}: must be at least 1")
    # `not a <= x < b` refuses NaN, too: every comparison with it is False.
    if not 0 <= options.noise < inf or not 0 <= options.seed < 2**63:
        raise UserError("--noise must be a number from 0 on, and --seed one below 2^63")

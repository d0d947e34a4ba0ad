"""`hpcfed attack`: what a malicious server can steal of clients' images."""

import argparse
from math import inf
from pathlib import Path

from hpcfed.cli.parser import CommandParser
from hpcfed.errors import UserError, unknown
from hpcfed.options import RunConfig

SUMMARY = "which images of clients a malicious server can reconstruct"
EXAMPLES = """\
  hpcfed attack idlg --out stolen.png                         images reconstructed from uploads
  hpcfed attack idlg --methods fedavg,genefl --dataset cifar10 --data-root /data --steps 100
  hpcfed attack idlg --run runs/fedavg                        of a network that a run has trained"""

FLAGS = """\
--methods A,B
  methods whose uploads are attacked (default: all, fedavg,fedavg-noise,parfed,fedlg,genefl)
--images N
  images to steal (default: 2)
--run FOLDER
  attack the network that this run has trained, on its data set: its global model, or a
  client's row of its last snapshot
--client N
  with --run: the client whose row is attacked (default: the global model; where there is
  none, the first client that took part)
--model NAME
  smooth (default): sigmoids, for which the attack works; or resnet18
--steps N
  outer steps of L-BFGS (default: 300)
--loss {squares,cosine}
  how gradients are compared: the sum of squared differences, as iDLG does (default), or
  their angle, for networks that are not smooth
--prior X
  weight of the image's total variation beside that (default: 0)
--noise X
  variance of the noise of fedavg-noise (default: 0.001)
--seed N
  seed of the network, the images and the noise (default: 0)
--dataset NAME
  data set whose test images are stolen (default: digits)
--data-root PATH
  folder of the data sets (default: $HPCFED_DATA, else ./data)
--device {auto,cpu,cuda}
  auto: a GPU where there is one (default)
--out PNG
  write a figure: originals above, reconstructions below
"""


def command(arguments: list[str]) -> None:
    options = _parser().parse_args(arguments)
    _check(options)
    trained = None
    if options.run is not None:
        from hpcfed.attacks.idlg import read_trained

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
        EXAMPLES,
        description="Shows what a malicious server can steal: images that iDLG "
        "reconstructs from what each method uploads.",
    )
    parser.add_argument("name", metavar="idlg", help="the attack")
    # These are not options of a run; only --dataset and --data-root mean the same.
    parser.add_flags(FLAGS, FOLDER=Path, PNG=Path)
    parser.set_defaults(
        methods="fedavg,fedavg-noise,parfed,fedlg,genefl",
        images=2,
        steps=300,
        loss="squares",
        prior=0.0,
        noise=0.001,
        seed=0,
        device="auto",
    )
    return parser


def _check(options: argparse.Namespace) -> None:
    if options.name != "idlg":
        raise unknown("attack of a server", options.name, ["idlg"])
    if options.run is not None and (options.model or options.dataset):
        given = "--model" if options.model else "--dataset"
        raise UserError(f"{given} is taken from the run with --run; leave it out")
    if options.client is not None and options.run is None:
        raise UserError("--client changes nothing without --run FOLDER")
    if options.model not in (None, "smooth", "resnet18"):
        raise unknown("model", options.model, ["smooth", "resnet18"])
    for flag in ("images", "steps"):
        number = getattr(options, flag)
        if number < 1:
            raise UserError(f"--{flag} {number}: must be at least 1")
    # `not a <= x < b` refuses NaN, too: every comparison with it is False.
    if not 0 <= options.prior < inf:
        raise UserError("--prior must be 0 or more")
    if not 0 <= options.noise < inf or not 0 <= options.seed < 2**63:
        raise UserError("--noise must be 0 or more, and --seed must be below 2^63")

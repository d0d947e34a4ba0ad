"""Find where the server's model beats what costs nothing to learn.

Every setting is a run of several seeds on digits, whose server learns once, at the end.
Its rows, from several depths of inversion, stand beside: the upload, the upload plus
noise, the mean of the client's uploads, the same mean shrunk towards that of all clients as
the variances say, or by one half, the inverted mean, and the mean of eight inversions. Upload plus noise and the last two belong to the
depth --own-depth.

A cell is the difference in points of accuracy, mean and standard error over seeds, and in
how many seeds it is positive. Accuracy is the mean over those clients that the bank knows,
each on its own test data. A difference of a rival to itself is left out.

examples:
  python -m benchmarks.server.rivals                                  all settings, five seeds
  python -m benchmarks.server.rivals groups "groups, untrained" --seeds 10..19
  python -m benchmarks.server.rivals groups --more "--inversion-noise fresh"
"""

import shlex
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks import launching
from benchmarks.arguments import parser_of
from benchmarks.paper.pictures import estimate
from hpcfed.results.run import RunRecord
from hpcfed.results.stored import read_run

COMMON = (
    "--method pfedgpa --model mlp --batch-size 10 --evaluate-every 1000 --no-server-save "
    "--finetune-epochs 0 --memorisation"
)
SIZE = "--server-model span --server tiny --server-batch 100"
SPAN = f"{SIZE} --denoiser-samples 20000"
UNTRAINED = f"{SIZE} --denoiser-samples 100 --server-lr 1e-12"
"""Its denoiser stays the ideal one of Gaussian data."""
P_DIFF = (
    "--server-model p-diff --server tiny --autoencoder-samples 16000 "
    "--denoiser-samples 32000"
)
SPARSE = "--clients 100 --rounds 20 --bank-rounds 10"
GROUPS = (
    "--partition dominant --uniform-share 0 --train-per-client 10 --test-per-client 40 "
    "--epochs 5"
)
"""Five groups of clients, each with three of the ten classes."""
SETTINGS = {
    "full": f"--clients 20 --rounds 10 --bank-rounds 5 {SPAN}",
    "full, p-diff": f"--clients 20 --rounds 10 --bank-rounds 5 {P_DIFF}",
    "10 %": f"{SPARSE} --participation 0.1 --alpha 0.3 {SPAN}",
    "5 %": f"{SPARSE} --participation 0.05 --alpha 0.3 {SPAN}",
    "few samples": f"{SPARSE} --participation 0.1 --partition iid {SPAN}",
    "groups": f"{SPARSE} --participation 0.1 {GROUPS} {SPAN}",
    "groups, untrained": f"{SPARSE} --participation 0.1 {GROUPS} {UNTRAINED}",
    "groups, p-diff": f"{SPARSE} --participation 0.1 {GROUPS} {P_DIFF}",
    "groups, fresh": f"{SPARSE} --participation 0.1 {GROUPS} {SPAN} --inversion-noise fresh",
    "groups, none": f"{SPARSE} --participation 0.1 {GROUPS} {SPAN} --inversion-noise none",
    "groups, full": f"--clients 100 --rounds 8 --bank-rounds 3 {GROUPS} {SPAN}",
}
"""Options of every setting."""
RIVALS = (
    "upload", "upload+noise", "mean of uploads", "shrunk mean", "halfway mean", "inverted mean",
    "mean of inversions",
)  # fmt: skip


def accuracies(record: RunRecord) -> dict[str, float]:
    """Return the mean accuracy, in per cent, of all that a run has judged."""
    sweep = record.depths
    assert sweep is not None, "the run has not ended"
    # Clients that the bank does not know have FedAvg's row in every contest.
    known = ~np.isnan(sweep.own[0])
    found = {"FedAvg": record.finals["FedAvg"]}
    found |= {rival: record.finals[rival] for rival in RIVALS}
    for depth, of_clients in zip(sweep.depth.tolist(), sweep.accuracy, strict=True):
        found[f"pFedGPA, {depth:.0f} steps"] = of_clients
    return {name: 100 * float(np.nanmean(a[known])) for name, a in found.items()}


def paired(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the mean difference of seeds, its standard error, and the wins."""
    differences = [our - their for our, their in zip(ours, theirs, strict=True)]
    wins = sum(difference > 0 for difference in differences)
    middle, error = estimate(differences)
    return f"{middle:+.2f} ± {error:.2f} ({wins}/{len(differences)})"


def measured(words: str, options: Namespace) -> dict[str, list[float]]:
    """Run a setting, and return every seed's accuracies by name."""
    with tempfile.TemporaryDirectory() as folder:
        command = shlex.split(f"{COMMON} {words} {options.more}")
        command += ["--inversion-depth", str(options.own_depth)]
        command += ["--depth-sweep", options.depths, "--seeds", options.seeds]
        command += ["--device", options.device, "--out", f"{folder}/run"]
        launching.run_hpcfed(command)
        seeds = sorted(Path(folder, "run").glob("seed-*"))
        every = [accuracies(read_run(seed)) for seed in seeds]
    return {name: [one[name] for one in every] for name in every[0]}


def show(setting: str, found: dict[str, list[float]]) -> None:
    """Print a line for everything that was judged, beside all rivals."""
    print(f"\n| {setting} | % | less {' | less '.join(RIVALS)} |")
    print(f"|---|---:{'|---:' * len(RIVALS)}|")
    for name, ours in found.items():
        cells = [paired(ours, found[r]) if r != name else "" for r in RIVALS]
        print(f"| {name} | {mean(ours):.2f} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    # argparse fills in what follows a per cent sign.
    names = ", ".join(SETTINGS).replace("%", "%%")
    parser.add_argument("settings", nargs="*", help=f"of {names} (default: all)")
    # Seeds 0 to 3 were used to find settings and a depth: judge by others.
    parser.add_argument("--seeds", default="10..14", help="at least two")
    parser.add_argument("--depths", default="50,100,200,350,500")
    parser.add_argument("--own-depth", type=int, default=350)
    parser.add_argument("--more", default="", help="further options of every run")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    for setting in options.settings or SETTINGS:
        if setting not in SETTINGS:
            parser.error(f"no setting {setting!r}; there are {', '.join(SETTINGS)}")
        show(setting, measured(SETTINGS[setting], options))


if __name__ == "__main__":
    main()

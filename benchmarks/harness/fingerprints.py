"""Fingerprint the numbers of deterministic runs, to show that a change of the code
changes none of them.

Runs every method, attack and aggregation rule on the embedded digits, on one rank and
on two. Each data set of metrics and parameters in the files of a run becomes one
SHA-256. Times, memory and energy are left out, and so is what describes the machine.
Two versions of the code compute the same if their fingerprints are equal.

`--package` names the folder that holds the version to run, so that this script can
measure a checkout of an older version.

examples:
  python -m benchmarks.harness.fingerprints --out before.json
  python -m benchmarks.harness.fingerprints --package ../older --out before.json
  python -m benchmarks.harness.fingerprints --compare before.json
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np

from benchmarks import launching
from benchmarks.arguments import parser_of

COMMON = "--clients 6 --rounds 3 --participation 0.7 --snapshot-every 1 --deterministic --device cpu"
NEWCOMERS = "--new-clients 2 --new-updates 2"
SERVER = "--bank-rounds 3 --autoencoder-samples 320 --denoiser-samples 320 --inversion-depth 20"
METHODS = {
    "apfl": "--local-steps 3 --apfl-adaptive",
    "clustered-fedavg": "--clusters 2",
    "ditto": "",
    "dual-lora": "--lora 4",
    "fedadagrad": "",
    "fedadam": "",
    "fedau": "",
    "fedasync": "--devices lognormal",
    "fedavg": "",
    "fedavg-ft": "",
    "fedavgm": "",
    "fedbabu": "",
    "fedbuff": "--devices lognormal --buffer 2",
    "fedbn": "--clusters 2 --model cnn-bn",
    "feddyn": "",
    "fedfina": "--clusters 2",
    "fedex-lora": "--lora 4",
    "fedlg": "--clusters 2",
    "fedlp": "--clusters 2",
    "fedlps": "--clusters 2 --model cnn-digits",
    "fednova": "",
    "fedper": "",
    "fedprox": "",
    "fedrep": "",
    "fedsa-lora": "--lora 4",
    "fedumf": "",
    "fedyogi": "",
    "ffa-lora": "--lora 4",
    "flexlora": "--lora 4 --client-ranks 2,4",
    "genefl": "--clusters 2 --model cnn-digits",
    "genfed": "",
    "genfedau": "",
    "genfedumf": "",
    "hetlora": "--lora 4",
    "lg-fedavg": "",
    "local": "",
    "parfed": "--clusters 2",
    "per-fedavg": "--local-steps 3",
    "pfedgpa": f"{SERVER} --server small --server-batch 32",
    "pfedhn": "--inner-steps 5 --welcome-rounds 2",
    "pfedme": "--local-rounds 2",
    "scaffold": "",
}
"""Options of every method's run."""
FURTHER = {
    "label-flip": "--attack label-flip",
    "mimic": "--attack mimic --attackers 2",
    "ipm": "--attack ipm --attackers 2",
    "ipm in parts": "--method genefl --clusters 2 --model cnn-digits --attack ipm --attackers 2",
    "sign-flip": "--attack sign-flip --attackers 2",
    "noise": "--attack noise --attackers 2",
    "genfed attacked": "--method genfed --attack ipm --attackers 2",
    "median": "--aggregation median",
    "trimmed mean": "--aggregation trimmed-mean --participation 1",
    "krum": "--aggregation krum --participation 1 --tolerance 0.2",
    "multi-krum": "--aggregation multi-krum --participation 1 --tolerance 0.2",
    "supplement": "--supplement --supplement-below 400",
    "sharding": "--partition sharding",
    "dominant": "--partition dominant --train-per-client 60 --test-per-client 20",
    "synthetic": "--dataset synthetic --synthetic-shape 1x8x8 --train-per-client 40 --test-per-client 10",
    "loop": "--engine loop --precision fp64",
    "augmented": "--augment crop-flip --clip 1 --weight-decay 1e-4 --lr-decay 0.9",
    "server every round": f"--method pfedgpa {SERVER} --server small --server-batch 32 --server-every 1",
    "seeds": "--seeds 0,3",
    "deadline": "--devices lognormal --deadline 0.5 --partial",
    "oversampled": "--devices uniform --oversample 1.5 --dropout-rate 0.1",
    "central privacy": "--privacy central --noise-multiplier 0.5 --clip-norm 1 --sampling poisson",
    "sample privacy": "--sample-noise 1 --sample-clip 1 --delta 1e-5",
    "topk": "--compress topk --ef21",
    "qsgd": "--compress qsgd",
    "powersgd": "--compress powersgd",
    "sign": "--compress sign --aggregation sign-majority",
    "both ways": "--compress topk --compress-down qsgd",
    "vmap": "--engine vmap --model cnn-digits",
    "adam": "--optimiser adam --model cnn-bn",
}
"""Options of runs beyond those of the methods."""
SKIPPED = (
    "timing/", "telemetry/", "environment", "config", "rounds/seconds", "rounds/cpu_seconds",
    "rounds/imbalance", "options",
)  # fmt: skip
SKIPPED_OF_SERVER = (
    "seconds", "samples_per_second", "peak_memory", "utilisation", "flops",
)  # fmt: skip


def cases() -> dict[str, tuple[int, str]]:
    """Return the ranks and the options of every run, by name."""
    runs = {
        name: f"--method {name} {NEWCOMERS} {words}" for name, words in METHODS.items()
    }
    runs |= FURTHER
    found = {}
    for name, words in runs.items():
        for ranks in (1, 2):
            found[f"{name}, {ranks} ranks"] = (ranks, words)
    found["pfedgpa, server rank"] = (3, f"{runs['pfedgpa']} --server-ranks 1")
    return found


def measure(package: Path, ranks: int, words: str) -> dict[str, str]:
    """Run hpcfed and return a fingerprint of every data set that it wrote."""
    variables = launching.environment(package) | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        work = ["-m", "hpcfed", "run", *COMMON.split(), *words.split()]
        work += ["--out", str(out)]
        done = subprocess.run(
            launching.on_ranks(ranks, work),
            capture_output=True,
            text=True,
            env=variables,
            # `python -m` looks for hpcfed in the current folder before PYTHONPATH.
            cwd=package,
        )
        if done.returncode:
            return {"failed": done.stderr.strip().splitlines()[-1]}
        prints: dict[str, str] = {}
        for path in sorted(out.rglob("*.h5")):
            if "checkpoints" not in path.parts:
                prints |= _fingerprints(path, str(path.relative_to(out)))
        return prints


def _fingerprints(path: Path, name: str) -> dict[str, str]:
    """Return a fingerprint of every data set of a file that does not depend on the
    machine.
    """
    found: dict[str, str] = {}
    for key, values in lasting(path).items():
        content = values.tobytes()
        if values.dtype == object:
            content = repr(values.tolist()).encode()
        shape = f"{values.dtype} {values.shape}".encode()
        found[f"{name}:{key}"] = hashlib.sha256(shape + content).hexdigest()
    return found


def lasting(path: Path) -> dict[str, np.ndarray]:
    """Return the data sets of a file that are neither times nor of the machine."""
    found: dict[str, np.ndarray] = {}

    def visit(key: str, item: h5py.HLObject) -> None:
        of_server = key.removeprefix("server/") if key.startswith("server/") else ""
        left_out = key.startswith(SKIPPED) or of_server in SKIPPED_OF_SERVER
        if isinstance(item, h5py.Dataset) and not left_out:
            found[key] = np.asarray(item[()])

    with h5py.File(path) as file:
        file.visititems(visit)
    return found


def compare(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> int:
    """Print what differs and return how many data sets do; new ones do not count."""
    differing = 0
    for case, old in before.items():
        new = after.get(case, {})
        for name, fingerprint in old.items():
            if new.get(name) != fingerprint:
                differing += 1
                print(
                    f"{case}: {name} {'differs' if name in new else 'is missing'} "
                    f"{new.get('failed', '')}"
                )
        for name in new.keys() - old.keys():
            print(f"{case}: {name} is new")
    return differing


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--package",
        type=Path,
        default=launching.ROOT,
        help="folder that holds the version to run",
    )
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--out", type=Path, help="file for the fingerprints")
    parser.add_argument(
        "--compare",
        type=Path,
        help="file of an earlier call: exit 1 if anything differs",
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="runs at a time (default: 2)"
    )
    asked = parser.parse_args()
    wanted = {name: case for name, case in cases().items() if asked.only in name}
    with ThreadPoolExecutor(asked.jobs) as pool:
        package = asked.package.resolve()
        prints = pool.map(lambda case: measure(package, *case), wanted.values())
        found = dict(zip(wanted, prints, strict=True))
    failed = {name: one["failed"] for name, one in found.items() if "failed" in one}
    for name, line in failed.items():
        print(f"{name} failed: {line}")
    print(f"{len(found)} runs, {sum(map(len, found.values()))} data sets")
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1))
    if asked.compare is not None:
        before = json.loads(asked.compare.read_text())
        expected = {name: one for name, one in before.items() if name in wanted}
        differing = compare(expected, found)
        print(f"{differing} data sets differ")
        sys.exit(1 if differing or failed else 0)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

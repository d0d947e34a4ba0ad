"""How often a benchmark fails when its work is done wrong, and passes when it is right.

Runs a benchmark's seeds again with a planted fault, together, and verifies every five
neighbouring seeds as one call of `hpcfed benchmark` would.

    python -m benchmarks.harness.power fedavg --seeds 20 --device cpu
"""

import tempfile
from typing import Any

from benchmarks.arguments import add_device, parser_of
from hpcfed.benchmark.definition import Benchmark, read_benchmark
from hpcfed.benchmark.reference import quality_of, read_reference
from hpcfed.benchmark.running import records_of
from hpcfed.benchmark.verification import check_learning

GROUP = 5
"""Seeds of one verification."""
RATES = (0.7, 1.3)
"""Factors of the learning rate."""


def faults(benchmark: Benchmark) -> dict[str, dict[str, Any]]:
    """Return the options of every case by name; the first two are right.

    On the machine that made the reference the first repeats all its stored digits, so it
    tells nothing there.
    """
    rate = benchmark.settings().config.lr
    cases: dict[str, dict[str, Any]] = {
        "right": {"precision": "tf32"},
        "right, fp64": {"precision": "fp64"},
    }
    for factor in RATES:
        cases[f"learning rate × {factor}"] = {"lr": factor * rate}
    return cases


def failures(benchmark: Benchmark, seeds: int, options: dict[str, Any]) -> list[bool]:
    """Tell for every group of neighbouring seeds whether its verification fails."""
    reference = read_reference(benchmark, None)
    quality = benchmark.definition.quality
    with tempfile.TemporaryDirectory() as folder:
        settings = benchmark.settings(seeds=list(range(seeds)), out=folder, **options)
        records = records_of(settings, together=benchmark.definition.stacked)
    found = [quality_of(record, quality) for record in records]
    stored = reference.means(seeds)
    failed = []
    for first in range(seeds):
        group = [(first + more) % seeds for more in range(GROUP)]
        ours, theirs = [found[i] for i in group], [stored[i] for i in group]
        check = check_learning(ours, theirs, benchmark.definition.margin)
        failed.append(not check.passed)
        if not first:
            print(f"  seeds 0 to {GROUP - 1}: {check.said}", flush=True)
    return failed


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("name", help="the benchmark")
    parser.add_argument("--size", default="small")
    parser.add_argument("--seeds", type=int, default=20)
    add_device(parser)
    options = parser.parse_args()
    given = {"device": options.device, "overwrite": True}
    benchmark = read_benchmark(options.name, options.size, given)
    for name, planted in faults(benchmark).items():
        failed = failures(benchmark, options.seeds, planted)
        print(f"{name}: {sum(failed)} of {len(failed)} fail", flush=True)


if __name__ == "__main__":
    main()

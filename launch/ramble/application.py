"""A Ramble application, also for Benchpark: hpcfed's benchmarks with rules.

Copy it to applications/hpcfed/ in a repository of Ramble. Each benchmark is a workload.
"""

from ramble.appkit import (
    ExecutableApplication,
    executable,
    figure_of_merit,
    required_package,
    software_spec,
    success_criteria,
    tags,
    workload,
    workload_variable,
)

BENCHMARKS = ["adapters", "fedavg", "genefl", "ranks", "server"]
RESULT = "{experiment_run_dir}/out/result.json"


class Hpcfed(ExecutableApplication):
    """Federated learning on clusters: one verified figure of a machine, in seconds."""

    name = "hpcfed"
    tags("machine-learning", "federated-learning", "mpi")
    software_spec("hpcfed", pkg_spec="py-hpcfed", package_manager="spack*")
    required_package("py-hpcfed", package_manager="spack*")

    executable(
        "benchmark",
        "python3 -m hpcfed benchmark {workload_name} --size {size}"
        # A second "ramble on" makes the runs again: else it would read the first's result.
        " --out {experiment_run_dir}/out --overwrite {more}",
        use_mpi=True,
    )
    for benchmark in BENCHMARKS:
        workload(benchmark, executables=["benchmark"])
    workload_variable(
        "size",
        default="small",
        values=["small", "medium", "large"],
        description="How much work",
        workloads=BENCHMARKS,
    )
    workload_variable(
        "more",
        default="",
        description="Further options of hpcfed benchmark",
        workloads=BENCHMARKS,
    )

    # Two spaces: the figure's own seconds. Those of each run stand further to the right.
    figure_of_merit(
        "figure",
        log_file=RESULT,
        fom_regex=r'^  "seconds": (?P<seconds>[0-9.e+-]+)',
        group_name="seconds",
        units="s",
    )
    figure_of_merit(
        "energy",
        log_file=RESULT,
        fom_regex=r'^ "energy_wh": (?P<energy>[0-9.e+-]+)',
        group_name="energy",
        units="Wh",
    )
    success_criteria(
        "passed", mode="string", match=r' "verdict": "PASSED"', file=RESULT
    )

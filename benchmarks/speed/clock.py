"""What the virtual clock costs in real seconds, as a share of a round.

All calls of the clock within a run are timed: who is there, when each client arrives,
who counts, and what is recorded of it. Rounds are those of synthetic samples, a few for
each client, and are not evaluated.

example:
  python -m benchmarks.speed.clock --clients 10000 --cohorts 100,1000
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import hpcfed
from benchmarks.arguments import parser_of
from hpcfed.federation.channel.clock import MembersTime, VirtualClock
from hpcfed.federation.exchange import Exchange

CALLS = {
    VirtualClock: ("next_moment", "available", "begin", "end"),
    MembersTime: ("download", "train", "upload", "table"),
    Exchange: ("_came",),
}
"""What the clock does in a round."""
SETTINGS = {
    "waits for all": {},
    "all options": {
        "deadline": 2.0,
        "oversample": 1.3,
        "dropout_rate": 0.1,
        "partial": True,
    },
}


class Stopwatch:
    """Adds up the real seconds of some functions, round by round; calls within each
    other count once.
    """

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self._depth = 0

    def timed(
        self, function: Callable[..., Any], *, begins: bool
    ) -> Callable[..., Any]:
        """Return the function, timed; one that `begins` a round is its first."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            if begins:
                self.rounds.append(0.0)
            self._depth += 1
            begin = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.rounds[-1] += time.perf_counter() - begin

        return call


def measure(watch: Stopwatch, options: dict[str, Any]) -> tuple[float, float]:
    """Make a run; return the median seconds of a round, and those of its clock."""
    watch.rounds.clear()
    with tempfile.TemporaryDirectory() as folder:
        run = hpcfed.run(progress=False, out=Path(folder) / "run", **options)
        seconds = np.asarray(run.rounds["seconds"])
    # The first round warms up, and the last one is evaluated.
    return float(np.median(seconds[1:-1])), float(np.median(watch.rounds[1:-1]))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--cohorts", default="100,1000")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--samples", type=int, default=20, help="of each client")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    watch = Stopwatch()
    for owner, names in CALLS.items():
        for name in names:
            plain = getattr(owner, name)
            begins = name == "next_moment"
            setattr(owner, name, watch.timed(plain, begins=begins))
    print(f"{'cohort':>6}  {'clock':<13}  round, ms  clock, ms  share")
    for cohort in map(int, arguments.cohorts.split(",")):
        for name, settings in SETTINGS.items():
            options = {
                "dataset": "synthetic",
                "synthetic_shape": "1x28x28",
                "partition": "dominant",
                "train_per_client": arguments.samples,
                "test_per_client": 1,
                "clients": arguments.clients,
                "cohort": cohort,
                "rounds": arguments.rounds,
                "evaluate_every": arguments.rounds,
                "evaluate_clients": 10,
                "epochs": 1,
                "batch_size": 10,
                "model": arguments.model,
                "device": arguments.device,
                "devices": "lognormal",
                **settings,
            }
            round, clock = measure(watch, options)
            print(
                f"{cohort:>6}  {name:<13}  {1e3 * round:>9.1f}  {1e3 * clock:>9.3f}  "
                f"{clock / round:>5.1%}"
            )


if __name__ == "__main__":
    main()

"""Not a test: a run that all ranks stop after some rounds. Arguments are their number,
and the options of the run.
"""

import sys

from hpcfed.cli import parse_run
from hpcfed.experiment.run import run
from hpcfed.runtime.signals import Stop


class StopAfter(Stop):
    def __init__(self, rounds: int) -> None:
        super().__init__()
        self._rounds = rounds

    def after(self, round: int) -> bool:
        return round + 1 == self._rounds


if __name__ == "__main__":
    run(parse_run(sys.argv[2:]), StopAfter(int(sys.argv[1])))

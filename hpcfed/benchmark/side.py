"""Makes the runs of one program when it is told to: a process of `hpcfed.benchmark.turns`.

It is started by its path, with another hpcfed in front of Python's path. So it uses only
what every version offers: `hpcfed.run`.
"""

import importlib
import json
import os
import sys
import traceback


def main() -> None:
    """Read a line of options for each run; answer each with a line when it has ended."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    # What libraries print must not be taken for an answer.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # By its name: this is the other program's hpcfed, and not the one we belong to.
    program = importlib.import_module("hpcfed")
    for line in sys.stdin:
        try:
            program.run(progress=False, **json.loads(line))
        except Exception:
            # Before the end of the answers, which is how a failure is noticed. To leave
            # may take a program longer.
            traceback.print_exc()
            answers.close()
            sys.exit(1)
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    main()

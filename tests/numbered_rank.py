"""Not a test: writes the number of its process to FOLDER/RANK, and then is what `python
WORDS` would be.

    mpirun -n 2 python tests/numbered_rank.py FOLDER WORDS…
"""

import os
import runpy
import sys
from pathlib import Path

folder, *words = sys.argv[1:]
Path(folder, os.environ["OMPI_COMM_WORLD_RANK"]).write_text(str(os.getpid()))
if words[0] == "-m":
    sys.argv = words[1:]
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
else:
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")

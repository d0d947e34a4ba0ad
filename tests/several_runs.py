"""Not a test: runs one after the other on the ranks of one job. Arguments are their
options, parted by plus signs.
"""

import sys
from itertools import groupby

from hpcfed.cli import parse_run
from hpcfed.experiment.run import run

for parting, words in groupby(sys.argv[1:], key="+".__eq__):
    if not parting:
        run(parse_run(list(words)))

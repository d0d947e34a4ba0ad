"""Not a test: one line about the tests that have run on a GPU. Arguments are seconds,
and pytest's XML reports.
"""

import sys
from xml.etree import ElementTree

import torch

seconds, *reports = sys.argv[1:]
counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
for report in reports:
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        for name in counts:
            counts[name] += int(suite.get(name, "0"))
bad = counts["failures"] + counts["errors"]
passed = counts["tests"] - bad - counts["skipped"]
nccl = ".".join(map(str, torch.cuda.nccl.version()))
machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {nccl}"
print(
    f"GPU tests: {passed} passed, {bad} failed, {counts['skipped']} skipped in "
    f"{seconds} s ({machine})"
)

"""A result as lines in the format of MLPerf's logs."""

import json
from collections.abc import Iterator
from datetime import datetime
from math import isnan
from typing import Any

from hpcfed.benchmark.result import BenchmarkResult
from hpcfed.results.run import RunRecord

FILE = "mllog.txt"


def mllog_lines(result: BenchmarkResult, records: list[RunRecord]) -> Iterator[str]:
    """Yield lines in the format of MLPerf's logs: start, evaluations and end of runs."""
    for run, record in zip(result.runs, records, strict=True):
        # The clock starts with the first round.
        end = datetime.fromisoformat(str(record.facts["finished"])).timestamp()
        start = end - run.all_seconds
        yield _line("submission_benchmark", result.benchmark, start)
        yield _line("seed", run.seed, start)
        yield _line("run_start", None, start, kind="INTERVAL_START")
        spent = record.rounds["seconds"].cumsum()
        for number, value in enumerate(record.judged()):
            if not isnan(value):
                when = start + float(spent[number])
                yield _line("eval_accuracy", float(value), when, round_num=number + 1)
        success = run.seconds is not None and result.verdict == "PASSED"
        status = "success" if success else "aborted"
        until = start + (run.all_seconds if run.seconds is None else run.seconds)
        yield _line("run_stop", None, until, kind="INTERVAL_END", status=status)


def _line(
    key: str, value: Any, when: float, *, kind: str = "POINT_IN_TIME", **more: Any
) -> str:
    content = {
        "namespace": "",
        "time_ms": round(1000 * when),
        "event_type": kind,
        "key": key,
        "value": value,
        "metadata": {"file": "hpcfed", "lineno": 0, **more},
    }
    return f":::MLLOG {json.dumps(content)}"

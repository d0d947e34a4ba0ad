"""What the runs of a benchmark must learn: curves of many seeds, stored as numbers.

Random streams depend on the seed alone, so a run on another machine makes the same draws
as the reference's run with the same seed. Their difference is rounding, and far smaller
than that between seeds.
"""

import json
from math import isnan
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hpcfed.benchmark.definition import FOLDER, Benchmark
from hpcfed.errors import UserError
from hpcfed.results.run import RunRecord

DIGITS = 5
"""Decimals of a stored number."""
MOST_BYTES = 2**24
Number = Annotated[float, Field(ge=-1e100, le=1e100)]
"""Sums of them and their squares are finite."""
Curve = Annotated[list[Number], Field(min_length=1)]
Plain = str | float | int | bool | list[str] | None


class Reference(BaseModel):
    """Curves of a quality over rounds, by seed, and the work that they belong to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    benchmark: str
    size: str
    quality: str
    made_by: str
    """Version, device and precision."""
    work: dict[str, Plain]
    """Options that the rules fix."""
    curves: Annotated[dict[int, Curve], Field(min_length=1)]

    @field_validator("curves")
    @classmethod
    def _has_all_seeds(cls, curves: dict[int, Curve]) -> dict[int, Curve]:
        if sorted(curves) != list(range(len(curves))):
            raise ValueError("seeds must be 0, 1, 2 and so on")
        return curves

    def means(self, seeds: int) -> list[float]:
        """Return the mean over rounds of the first seeds."""
        if seeds > len(self.curves):
            raise UserError(
                f"--runs {seeds}: the reference of {self.benchmark} {self.size} has "
                f"only {len(self.curves)} seeds"
            )
        return [fmean(self.curves[seed]) for seed in range(seeds)]

    def quality_like(self, record: RunRecord) -> float:
        """Return a run's mean over rounds; NaN if it lacks some of the reference's."""
        stored = self.curves[int(record.facts["seed"])]
        values = curve(record, self.quality)
        return fmean(values) if len(values) == len(stored) else float("nan")

    def spread(self) -> float:
        """Return the standard deviation over seeds."""
        means = self.means(len(self.curves))
        return stdev(means) if len(means) > 1 else 0.0


def curve(record: RunRecord, quality: str) -> list[float]:
    """Return a quality after each evaluated round."""
    values = record.rounds[quality].tolist()
    return [round(value, DIGITS) for value in values if not isnan(value)]


def quality_of(record: RunRecord, quality: str) -> float:
    """Return the mean of a quality over rounds; NaN if no round has it."""
    values = curve(record, quality)
    return fmean(values) if values else float("nan")


def text_of(reference: Reference) -> str:
    """Return a reference as JSON, with one line for each seed."""
    content = reference.model_dump()
    curves = content.pop("curves")
    lines = [f'  "{seed}": {json.dumps(values)}' for seed, values in curves.items()]
    head = json.dumps(content, indent=1).removesuffix("\n}")
    return head + ',\n "curves": {\n' + ",\n".join(lines) + "\n }\n}\n"


def file_of(benchmark: Benchmark) -> Path:
    """Return where the reference of a benchmark in its size is shipped."""
    return FOLDER / f"{benchmark.name}-{benchmark.size}.json"


def read_reference(benchmark: Benchmark, path: Path | None) -> Reference:
    """Read a reference, and refuse one of other work."""
    file = path or file_of(benchmark)
    if not file.is_file():
        known = (
            ""
            if path
            else (
                f"; make one: hpcfed benchmark {benchmark.word} --size {benchmark.size} "
                "--reference, then name it with --against, which breaks the rules: the "
                "result is FAILED"
            )
        )
        raise UserError(f"there is no reference {file.name}{known}")
    try:
        found = Reference.model_validate_json(content_of(file))
    except (OSError, ValueError) as error:
        reason = first_problem(error)
        raise UserError(f"{file} is not a benchmark's reference: {reason}") from None
    _check_work(found, benchmark, file)
    return found


def content_of(file: Path) -> bytes:
    """Read a file of a benchmark; raise a ValueError if it is too large for one."""
    # Not by its size: a device has none, and does not end.
    with file.open("rb") as opened:
        content = opened.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError("it is too large")
    return content


def first_problem(error: Exception) -> str:
    """Say what is wrong with a file, in one line, and where."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    where = "".join(f"{part}: " for part in first["loc"])
    return where + first["msg"].lower()


def _check_work(found: Reference, benchmark: Benchmark, file: Path) -> None:
    wanted = benchmark.work() | {
        "benchmark": benchmark.name,
        "size": benchmark.size,
        "quality": benchmark.definition.quality,
    }
    had = found.work | found.model_dump(include={"benchmark", "size", "quality"})
    # An option that one side does not have is from another version.
    for name in sorted(wanted.keys() & had.keys()):
        if portable(wanted[name]) != had[name]:
            raise UserError(
                f"{file} is for {name} {had[name]}, not {portable(wanted[name])}; make "
                "it again with --reference"
            )


def portable(value: Plain) -> Plain:
    """Return an option's value as a reference says it, on any machine."""
    # Files that come with hpcfed lie elsewhere on other machines.
    if isinstance(value, str) and value.startswith("/"):
        return Path(value).name
    return value

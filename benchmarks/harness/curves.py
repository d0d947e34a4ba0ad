"""Compare every method's curves with stored ones: loss and accuracy of 20 tiny rounds in
float64 and float32.

On a machine of the kind that made a curve, every bit must be the same. Elsewhere (other
processors, versions of torch, GPUs) both precisions must stay within a stored bound of
the float64 curve. Prints a line for every figure that differs: method, precision, round,
stored and new value, and its distance from the float64 curve in units of the bound. Exits
with 1 if a curve is missing, or is not what it must be.

--write renews curves that are not as they must be, or all that --methods names, with new
bounds. Nothing is written without it.

How a bound is found: a run is repeated in float64, and every row that local training
returns is moved at random by 64 times what rounding in this precision could have moved
it. The largest distance between curves in four such runs is the bound. Networks are
smooth, so that curves move in proportion to the noise, as the bounds of both precisions
show; an answer or a choice near a tie would flip, and show as a bound that is larger.

examples:
  python -m benchmarks.harness.curves
  python -m benchmarks.harness.curves --methods fedavg scaffold --device cuda
  python -m benchmarks.harness.curves --methods fedavg --write
"""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from benchmarks.arguments import parser_of
from benchmarks.harness.trajectories import (
    TERMS,
    UNITS,
    Noise,
    Trajectory,
    follow,
    words_of,
)
from hpcfed import methods
from hpcfed.benchmark.reference import first_problem
from hpcfed.errors import UserError
from hpcfed.runtime.machine import CPUINFO, this_machine

FILE = Path(__file__).with_name("curves.json")
COMMAND = "python -m benchmarks.harness.curves"
DRAWS = 4
TIMES = 64
"""Noise of a bound, in units of rounding. A curve that is linear in rounding errors moves
by a normal number; that four draws and all rounds stay below 1/64 of what a machine's own
rounding does, which is one draw more, will not happen.
"""
FEATURES = ("flags", "Features", "stepping", "CPU variant", "CPU revision")
"""What /proc/cpuinfo says of instructions and of the processor's make."""
LIBRARIES = ("MKL_", "DNNL_", "ONEDNN_", "ATEN_")
"""Variables that choose kernels of libraries begin with these."""
Precision = Literal["fp64", "fp32"]
PRECISIONS: tuple[Precision, ...] = ("fp64", "fp32")


class Curve(BaseModel):
    """A method's curve in one precision."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bits: str
    bounds: dict[str, float]
    """The largest distance of a figure from the float64 curve, on any machine."""
    figures: dict[str, list[float]]


class Reference(BaseModel):
    """A method's curves, what made them and how."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    options: str
    machine: str
    fp64: Curve
    fp32: Curve

    def curve(self, precision: Precision) -> Curve:
        return self.fp64 if precision == "fp64" else self.fp32


class References(BaseModel):
    """All stored curves, and the machines that made them."""

    model_config = ConfigDict(extra="forbid")

    machines: dict[str, dict[str, str]]
    methods: dict[str, Reference]


class Difference(NamedTuple):
    """A figure that is not the stored one, in the round where it is farthest off."""

    figure: str
    round: int
    stored: float
    found: float
    ratio: float
    """Its distance from the float64 curve in units of the bound."""


def read(path: Path) -> References:
    """Return the stored curves; none if the file is not there."""
    if not path.is_file():
        return References(machines={}, methods={})
    try:
        return References.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UserError(f"{path.name} has no curves: {first_problem(error)}") from None


def text_of(value: object, indent: str = "") -> str:
    """Return what JSON can hold as JSON, with a line for each list."""
    if not isinstance(value, dict):
        return json.dumps(value)
    inner = f"{indent} "
    lines = [
        f"{inner}{json.dumps(name)}: {text_of(value[name], inner)}"
        for name in sorted(value)
    ]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def machine(device: str) -> dict[str, str]:
    """Return what decides the bits of a run: two machines that agree round alike."""
    facts: dict[str, str] = {}
    for line in CPUINFO.read_text().split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        facts[name.strip()] = value.strip()
    made = "\n".join(facts.get(name, "") for name in FEATURES)
    caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    chosen = [f"{k}={v}" for k, v in os.environ.items() if k.startswith(LIBRARIES)]
    found = {
        "architecture": platform.machine(),
        "processor": this_machine().cpu,
        "features": _short(made),
        "caches": " ".join(path.read_text().strip() for path in sorted(caches)),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "libraries": _short(torch.__config__.show()),
        "libc": " ".join(platform.libc_ver()),
        "threads": "1",
        "variables": " ".join(sorted(chosen)),
    }
    if device != "cpu":
        found["device"] = torch.cuda.get_device_name()
    return found


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def name_of(machine: dict[str, str]) -> str:
    """Return a short name for a machine, by what decides its bits."""
    return f"{machine['architecture']}-{_short(json.dumps(machine, sort_keys=True))}"


def compare(
    found: Trajectory, reference: Reference, precision: Precision
) -> list[Difference]:
    """Return what differs from a stored curve, of as many rounds as were made."""
    stored, exact = reference.curve(precision), reference.fp64
    differing = []
    for figure, values in found.figures.items():
        bound = stored.bounds[figure]
        rounds = zip(
            range(1, len(values) + 1),
            stored.figures[figure],
            values,
            exact.figures[figure],
            strict=False,
        )
        worst = max(
            (
                Difference(figure, round, old, new, _ratio(new - near, bound))
                for round, old, new, near in rounds
            ),
            key=lambda one: (one.ratio, one.stored != one.found),
        )
        if values != stored.figures[figure][: len(values)]:
            differing.append(worst)
    return differing


def _ratio(distance: float, bound: float) -> float:
    if distance == 0:
        return 0.0
    # NaN is not within anything.
    ratio = abs(distance) / bound if bound else float("inf")
    return ratio if ratio >= 0 else float("inf")


def is_right(
    found: Trajectory, reference: Reference, precision: Precision, here: str
) -> bool:
    """Tell whether a whole run is what it must be on the machine of this name."""
    if here == reference.machine:
        return found.bits == reference.curve(precision).bits
    return all(one.ratio <= 1 for one in compare(found, reference, precision))


def measured(method: str) -> Reference:
    """Make a method's curves and their bounds on this machine."""
    exact = follow(method, "fp64")
    curves = {}
    for precision in PRECISIONS:
        found = exact if precision == "fp64" else follow(method, precision)
        curves[precision] = Curve(
            bits=found.bits,
            bounds=_bounds(method, precision, exact),
            figures=found.figures,
        )
    here = name_of(machine("cpu"))
    return Reference(options=words_of(method), machine=here, **curves)


def _bounds(method: str, precision: Precision, exact: Trajectory) -> dict[str, float]:
    unit = UNITS[precision]
    if methods.load(method).Options.has_server:
        # The server's model is float32 in every precision of the clients.
        unit = UNITS["fp32"]
    noises = [Noise(unit, TIMES, draw) for draw in range(DRAWS)]
    noisy = [follow(method, "fp64", change=noise).figures for noise in noises]
    bounds = {}
    for figure, values in exact.figures.items():
        # A mean over samples is rounded, too; that over clients is float64.
        mean = UNITS["fp64"] if figure == "accuracy" else unit
        largest = TERMS * mean * max(1.0, *values)
        for draw in noisy:
            distances = zip(draw[figure], values, strict=True)
            largest = max(largest, *(abs(one - other) for one, other in distances))
        bounds[figure] = float(f"{largest:.2e}")
    return bounds


def check(
    references: References, names: Sequence[str], device: str
) -> Iterator[tuple[str, bool]]:
    """Make the runs of these methods, print what differs, and yield each method with
    whether its curves are what they must be.
    """
    for name in names:
        reference = references.methods.get(name)
        if reference is None:
            print(f"{name} has no curve: {COMMAND} --methods {name} --write")
            yield name, False
            continue
        if reference.options != words_of(name):
            print(f"{name}: the curve is of other options: {reference.options}")
            yield name, False
            continue
        right = [_is_told_right(reference, name, each, device) for each in PRECISIONS]
        yield name, all(right)


def _is_told_right(
    reference: Reference, name: str, precision: Precision, device: str
) -> bool:
    """Make a run, print how it differs, and tell whether it is what it must be."""
    found = follow(name, precision, device=device)
    differing = compare(found, reference, precision)
    here = name_of(machine(device))
    if is_right(found, reference, precision, here):
        farthest = max((one.ratio for one in differing), default=0.0)
        if here != reference.machine:
            print(f"{name} {precision}: {farthest:.2g} of its bound")
        return True
    for one in differing:
        print(
            f"{name} {precision} {one.figure}, round {one.round}: {one.stored!r} is now "
            f"{one.found!r}, {one.ratio:.2g} of its bound"
        )
    if not differing:
        print(f"{name} {precision}: rows after the last round have other bits")
    return False


def write(references: References, names: Sequence[str], path: Path) -> None:
    """Renew the curves of these methods, and forget those that no method has."""
    for name in names:
        print(f"renewing {name}", file=sys.stderr)
        references.methods[name] = measured(name)
        references.machines[references.methods[name].machine] = machine("cpu")
    for name in references.methods.keys() - set(methods.names()):
        print(f"{name} is no method any more: its curve is removed")
        del references.methods[name]
    used = {one.machine for one in references.methods.values()}
    for name in references.machines.keys() - used:
        del references.machines[name]
    path.write_text(text_of(references.model_dump()) + "\n")


def main(words: Sequence[str] | None = None) -> int:
    """Check or renew curves; return the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="NAME",
        choices=methods.names(),
        help="only these methods (default: all)",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--write", action="store_true", help=f"renew curves in {FILE.name}"
    )
    asked = parser.parse_args(words)
    if asked.write and asked.device != "cpu":
        parser.error("--write: stored curves are those of a CPU")
    try:
        references = read(FILE)
        names = asked.methods or methods.names()
        found = dict(check(references, names, asked.device))
    except UserError as error:
        print(f"curves: {error}", file=sys.stderr)
        return 2
    wrong = [name for name, right in found.items() if not right]
    print(f"{len(found)} methods, {len(wrong)} not as stored")
    if asked.write:
        write(references, asked.methods or wrong, FILE)
        return 0
    if wrong:
        print(f"if these are right: {COMMAND} --methods {' '.join(wrong)} --write")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

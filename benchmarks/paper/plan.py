"""A plan: the cells of several studies, each with seeds and options of its own, in the
order in which they matter.

One line has a study's file, a pattern of cells, seeds, and options that win over the
file. `as=NAME` is the folder in --out that its cells stand in, in place of the file's
name; cells with other options need another one.

    # study        cells                    seeds   options
    genfed.toml    cifar10/base/genfed      0..2
    genfed.toml    cifar10/base/*           0       rounds=1000
    genfed.toml    cifar10/base/genfed      0       batch_size=32  as=batch-32

A cell belongs to the first line that names it, so that a wide pattern below stands for
the rest.
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.paper.cells import Cell, fits, pairs_of, plan
from benchmarks.paper.study import Study, read_study
from hpcfed.errors import UserError


class Line(NamedTuple):
    """What one line of a plan asks for."""

    study: Path
    pattern: str
    seeds: str
    options: tuple[str, ...] = ()
    """OPTION=VALUE words."""
    folder: str = ""
    """Where its cells stand in --out."""


def read_plan(path: Path, options: argparse.Namespace) -> list[Cell]:
    """Return the cells of a plan, in its order; those alone that --only leaves."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--plan {path}: cannot be read: {error}") from None
    cells: dict[Path, Cell] = {}
    studies: dict[Path, Study] = {}
    for number, words in enumerate(text.splitlines(), start=1):
        try:
            line = read_line(words, path.parent)
            if line is None:
                continue
            if line.study not in studies:
                studies[line.study] = read_study(line.study)
            for cell in _cells(line, studies[line.study], options):
                cells.setdefault(cell.folder, cell)
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
    left = [cell for cell in cells.values() if fits(str(cell), options.only)]
    if not left:
        raise UserError(f"--plan {path}: no cell is asked for")
    return left


def read_line(text: str, beside: Path) -> Line | None:
    """Read one line; None where there is nothing but a comment.

    A study's file lies in the folder that we are in, or `beside` the plan.
    """
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise UserError(f"{error}".lower()) from None
    if not words:
        return None
    if len(words) < 3:
        raise UserError("needs a study's file, a pattern of cells, and seeds")
    file, pattern, seeds, *rest = words
    study = Path(file)
    if not study.exists() and (beside / file).exists():
        study = beside / file
    pairs = pairs_of("option", rest, "rounds=3")
    folder = pairs.pop("as", study.stem)
    if not folder or Path(folder).name != folder:
        raise UserError(f"as={folder}: must be the name of a folder in --out")
    changes = tuple(f"{name}={value}" for name, value in pairs.items())
    return Line(study, pattern, seeds, changes, folder)


def _cells(line: Line, study: Study, options: argparse.Namespace) -> Sequence[Cell]:
    """Return the cells of one line; its options win over --set."""
    sources = pairs_of("--data", options.data, "svhn=file:svhn.npz")
    data = [f"{name}={at}" for name, at in sources.items() if name in study.datasets]
    given = vars(options) | {
        "study": line.study,
        "only": [line.pattern],
        "seeds": line.seeds,
        "set": [*options.set, *line.options],
        "out": options.out / line.folder,
        "data": data,
    }
    return plan(study, argparse.Namespace(**given))

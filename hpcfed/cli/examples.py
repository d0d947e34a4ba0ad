"""`hpcfed examples`: list what is shipped with hpcfed, or copy it to work on."""

import shutil
from pathlib import Path

from hpcfed import shipped
from hpcfed.cli.parser import CommandParser
from hpcfed.errors import UserError, count, say
from hpcfed.results.publish import check_folder

SUMMARY = "examples, ready studies and Slurm scripts, to read or to copy"
EXAMPLES = """\
  hpcfed examples                                             what there is
  hpcfed examples .                                           copies of all, in folders here"""


def command(arguments: list[str]) -> None:
    parser = CommandParser(
        "examples",
        EXAMPLES,
        description="Lists examples, ready studies and Slurm scripts, or copies them. "
        "A file that is there already is never overwritten.",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="copy them into this folder (default: only list them)",
    )
    folder = parser.parse_args(arguments).folder
    if folder is None:
        _list()
    else:
        _copy(folder)


def _list() -> None:
    files = [path for path in shipped.files_below(shipped.top()) if _is_example(path)]
    folder = None
    for path in files:
        if path.parent != folder:
            folder = path.parent
            print(f"{folder}:")
        print(f"  {path.name:20} {shipped.summary(shipped.top() / path)}")
    print("copy them all to where you are: hpcfed examples .")


def _is_example(path: Path) -> bool:
    return path.suffix != ".md"


def _copy(folder: Path) -> None:
    """Copy files that are missing; say which existing ones were kept."""
    check_folder("examples", folder)
    files = shipped.files_below(shipped.top())
    kept = []
    for path in files:
        target = folder / path
        # `exists` is False for a broken link, but we must not overwrite it either.
        if target.exists() or target.is_symlink():
            kept.append(str(target))
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(shipped.top() / path, target)
        except OSError as error:
            raise UserError(f"cannot copy to {folder}: {error.strerror}") from None
    there = f"; kept what was there: {', '.join(kept)}" if kept else ""
    say(f"{count(len(files) - len(kept), 'file')} copied to {folder}{there}")

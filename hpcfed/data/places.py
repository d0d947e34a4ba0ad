"""Where a user's file or folder is: as given, or below the folder of all data."""

from collections.abc import Callable
from pathlib import Path

from hpcfed.errors import UserError


def find_folder(
    name: str, prefix: str, *, root: Path | None, example: str, wanted: str
) -> Path:
    """Return the folder of `PREFIX:DIR`; `wanted` says what should be in it."""
    given = _given(name, prefix, "folder", example)
    return _found(name, given, root, Path.is_dir, "folder", f"give one {wanted}")


def find_file(
    name: str, prefix: str, *, root: Path | None, example: str, wanted: str
) -> Path:
    """Return the file of `PREFIX:PATH`; `wanted` says what it should be."""
    given = _given(name, prefix, "path", example)
    helps = f"give the path of {wanted}"
    return _found(name, given, root, Path.is_file, "file", helps)


def _given(name: str, prefix: str, what: str, example: str) -> str:
    given = name.removeprefix(prefix)
    if not given:
        raise UserError(
            f"{prefix} needs a {what} after the colon, e.g. {prefix}{example}"
        )
    return given


def _found(
    name: str,
    given: str,
    root: Path | None,
    is_there: Callable[[Path], bool],
    what: str,
    helps: str,
) -> Path:
    path = Path(given).expanduser()
    # The path as given comes first, because a shell completes it that way.
    places = [path]
    if root is not None and not path.is_absolute():
        places.append(root / path)
    for place in places:
        if is_there(place):
            return place
    raise UserError(f"{name}: no {what} {' or '.join(map(str, places))}; {helps}")

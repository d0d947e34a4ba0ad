"""Where a file or folder of the user's is: as given, or below the folder of all data."""

from pathlib import Path

from hpcfed.errors import UserError


def find_folder(
    name: str, prefix: str, *, root: Path | None, example: str, wanted: str
) -> Path:
    """Return the folder that `PREFIX:DIR` means; `wanted` says what should be in it."""
    given = name.removeprefix(prefix)
    if not given:
        raise UserError(
            f"{prefix} needs a folder after the colon, e.g. {prefix}{example}"
        )
    places = _places(given, root)
    for place in places:
        if place.is_dir():
            return place
    raise UserError(
        f"{name}: no folder {' or '.join(map(str, places))}; give one {wanted}"
    )


def find_file(
    name: str, prefix: str, *, root: Path | None, example: str, wanted: str
) -> Path:
    """Return the file that `PREFIX:PATH` means; `wanted` says what it should be."""
    given = name.removeprefix(prefix)
    if not given:
        raise UserError(
            f"{prefix} needs a path after the colon, e.g. {prefix}{example}"
        )
    places = _places(given, root)
    for place in places:
        if place.is_file():
            return place
    raise UserError(
        f"{name}: no file {' or '.join(map(str, places))}; give the path of {wanted}"
    )


def _places(given: str, root: Path | None) -> list[Path]:
    path = Path(given).expanduser()
    # The path as given comes first: a shell completes it so.
    if root is None or path.is_absolute():
        return [path]
    return [path, root / path]

"""Where a folder of the user's is: as it was given, or below the folder of all data."""

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
    folder = Path(given).expanduser()
    # The path as given comes first: a shell completes it so.
    candidates = [folder]
    if root is not None and not folder.is_absolute():
        candidates.append(root / folder)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise UserError(
        f"{name}: no folder {' or '.join(map(str, candidates))}; give one {wanted}"
    )

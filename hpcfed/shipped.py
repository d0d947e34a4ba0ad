"""Files that come with hpcfed besides its code: examples, ready studies, Slurm scripts.

A checkout has them in its top folder. A wheel has copies under the same names, put
there by launch/wheel.py. So what the README pages say about them is right in both.
"""

import ast
import json
import re
from pathlib import Path

FOLDERS = (
    "benchmarks/examples",
    "benchmarks/published",
    "benchmarks/studies",
    "benchmarks/workloads",
    "slurm",
)
COPIES = "shipped_files"
"""The folder of a wheel's package that holds the copies."""
_PACKAGE = Path(__file__).resolve().parent
_CACHES = {"__pycache__", ".ipynb_checkpoints"}


def top() -> Path:
    """Return the folder that contains FOLDERS."""
    copies = _PACKAGE / COPIES
    return copies if copies.is_dir() else _PACKAGE.parent


def files_below(root: Path) -> list[Path]:
    """Return the files in all FOLDERS, relative to their parent folder."""
    found = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and not _CACHES.intersection(path.parts):
                found.append(path.relative_to(root))
    return found


def ready_studies() -> dict[str, Path]:
    """Return the study files by name, as in `hpcfed study quick`."""
    files = sorted((top() / "benchmarks/studies").glob("*.toml"))
    return {path.stem: path for path in files}


def summary(path: Path) -> str:
    """Return the first sentence of a shipped file's own description."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
    elif path.suffix == ".ipynb":
        said = "".join(json.loads(text)["cells"][0]["source"])
    else:
        # A script begins with a shebang line.
        lines = [line for line in text.splitlines() if not line.startswith("#!")]
        said = "\n".join(lines)
    return _first_sentence(said)


def _first_sentence(said: str) -> str:
    """Return the first sentence of a comment or docstring, which may span lines."""
    words: list[str] = []
    for line in said.strip().splitlines():
        text = line.removeprefix("#")
        # A blank line ends it, and so does an indented command.
        if words and (not text.strip() or text.startswith("   ")):
            break
        words += text.strip("# ").split()
    paragraph = " ".join(words)
    # Do not split at the dot of "et al. 2020".
    sentence = re.split(r"[.:] (?=[A-Z])|: hpcfed ", paragraph, maxsplit=1)[0]
    return sentence.rstrip(".:")

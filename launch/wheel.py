"""Puts into a wheel what comes with hpcfed; pyproject.toml names the class, and says
everything else.
"""

import runpy
import shutil
from pathlib import Path

from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parents[1]
# Read as a file, because hpcfed cannot be imported before it is installed.
SHIPPED = runpy.run_path(str(ROOT / "hpcfed/shipped.py"))
FILES: list[Path] = SHIPPED["files_below"](ROOT)


class BuildWithShipped(build_py):
    """Copies shipped files beside the code; an editable install finds the originals."""

    def run(self) -> None:
        super().run()
        for copy, original in self._copies().items():
            Path(copy).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(original, copy)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._copies()]

    def get_source_files(self) -> list[str]:
        """Return what a source distribution needs."""
        files = [*FILES, Path("launch/wheel.py")]
        return [*super().get_source_files(), *map(str, files)]

    def _copies(self) -> dict[str, str]:
        if self.editable_mode:
            return {}
        folder = Path(self.build_lib) / "hpcfed" / SHIPPED["COPIES"]
        return {str(folder / file): str(file) for file in FILES}

"""The commands and their arguments, one file per command."""

from hpcfed.cli.commands import main
from hpcfed.cli.settings import parse_run

__all__ = ["main", "parse_run"]

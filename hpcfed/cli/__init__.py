"""The commands and their arguments, one file per command."""

from hpcfed.cli.commands import main
from hpcfed.cli.settings import keyword_settings, parse_run

__all__ = ["keyword_settings", "main", "parse_run"]

"""The one exception that is the user's to mend."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake that the user can mend: shown as one line, without a traceback, with exit code 2."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'fedavg'?` when something known is close to the word, otherwise nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""

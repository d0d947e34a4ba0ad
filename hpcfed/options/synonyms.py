"""What other tools and papers call our options, to guess what a user means."""

from collections.abc import Iterable

from hpcfed.errors import did_you_mean, plain_name
from hpcfed.options.declare import synonyms

WITHOUT_A_MATCH = {
    "config_file",
    "eval_batch_size",
    "num_classes",
    "num_workers",
    "test_batch_size",
    "workers",
}
"""Names of other tools that are spelt nearly like an option which means something else.
"""


def suggest_option(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean '--lr'?` where a known option means the same as the word
    or is spelt nearly so, else nothing.
    """
    # By meaning first: `cohort` is spelt nearly like `smooth`, which misleads.
    names = list(known)
    by_plain = {plain_name(name): name for name in names}
    plain = plain_name(word)
    if plain in WITHOUT_A_MATCH:
        return ""
    for option, words in synonyms().items():
        # Papers tell E, epochs, from e; tools do not tell --LR from --lr.
        means = plain in words or plain.lower() in words
        if means and option in by_plain:
            return f"; did you mean '{by_plain[option]}'?"
    return did_you_mean(word, names)

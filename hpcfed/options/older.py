"""What records of older versions say in another way."""

from collections.abc import Mapping
from typing import Any

# The list is closed: options that are added later never wrote 0 for unset.
ZERO_WAS_UNSET = frozenset(
    {
        "validation",
        "supplement_below",
        "krum_keep",
        "finetune_epochs",
        "gene_layers",
        "hn_embedding",
        "server_width",
        "server_latent",
        "server_depth",
        "generated_layers",
        "autoencoder_samples",
        "denoiser_samples",
        "denoiser_batch",
        "server_micro_batch",
        "server_lr",
    }
)
"""Options that are None today where something else decides, and once were 0."""

AMOUNTS_TODAY = frozenset({"finetune_epochs"})
"""Those of them for which 0 is a value like any other today."""


def with_old_meaning(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded config with what older versions did where an option is missing
    whose default does something else today.
    """
    made = unset_zeros(config)
    if "bank_rounds" in made:
        # They had no other.
        made.setdefault("bank_of", "uploads")
    return made


def unset_zeros(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded config with None where 0 meant that an option was unset.

    So runs of old and new versions with equal options compare as equal.
    """
    made = dict(config)
    # Records have them all: in one that is so old, others are 0 as well.
    others = (ZERO_WAS_UNSET - AMOUNTS_TODAY) & config.keys()
    if others and not any(config[name] == 0 for name in others):
        return made
    for name in ZERO_WAS_UNSET & config.keys():
        # A damaged record's False is left for the checks to find.
        if made[name] == 0 and made[name] is not False:
            made[name] = None
    return made

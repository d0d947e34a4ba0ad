"""Privacy of a run in words: what its ε is, and what it stands for."""

from hpcfed.errors import count
from hpcfed.federation.channel.accountant import accountant_of, noise_multiplier_of
from hpcfed.options import RunConfig


def guarantee(config: RunConfig) -> str:
    """Say what ε of a private run is, and what it is for: one line."""
    if config.sample_noise is not None:
        return _of_samples(config, config.sample_noise)
    if config.clips_alone:
        return "no ε holds: updates are clipped, and z = 0 adds no noise"
    accountant, multiplier = accountant_of(config), noise_multiplier_of(config)
    epsilon = accountant.epsilon(multiplier, config.rounds)
    said = (
        f"ε = {epsilon:.3g} after {count(config.rounds, 'round')} at δ = "
        f"{accountant.delta:.2g} (z = {multiplier:.4g}, {accountant.kind}); neighbours: "
        f"{accountant.neighbours}; "
    )
    if config.privacy == "local":
        return said + "every round in which a client takes part counts in full"
    said += f"{accountant.sampling} sampling at rate {accountant.rate:.3g}"
    if config.hypothetical:
        cohort, population = f"{accountant.cohort:,}", f"{accountant.population:,}"
        said += f", as if rounds had {cohort} of {population} clients"
    return said


def _of_samples(config: RunConfig, multiplier: float) -> str:
    if not multiplier:
        return "no ε holds: samples' gradients are clipped, and z = 0 adds no noise"
    return (
        f"DP-SGD within clients at δ = {config.delta:.2g} (z = {multiplier:.4g}, "
        f"{config.accountant}); rounds/epsilon has ε of the sample that was trained on "
        "most often, one release an epoch; neighbours: another sample in its place"
    )

"""Options of differential privacy: clipping of updates, noise, and accounting of ε."""

from collections.abc import Iterable
from typing import ClassVar, Literal

from hpcfed.errors import UserError, count
from hpcfed.options.aggregation import AggregationOptions
from hpcfed.options.compression import CompressionOptions
from hpcfed.options.declare import LEFT_OUT, Choice, Need, flag_of, option
from hpcfed.options.devices import DeviceOptions
from hpcfed.options.malicious import ATTACKS, MaliciousOptions
from hpcfed.options.run import NewcomerOptions
from hpcfed.options.traits import MethodTraits, promises_of

_PRIVATE = Need("--privacy central", lambda run: run.privacy != "none")
_CENTRAL = Need("--privacy central", lambda run: run.privacy == "central")
_ACCOUNTED = Need(
    "--privacy central",
    lambda run: run.privacy != "none" or run.sample_noise is not None,
)
_NOISY = Need("noise: a --noise-multiplier above 0", lambda run: not run.clips_alone)


class PrivacyOptions(
    DeviceOptions,
    CompressionOptions,
    MaliciousOptions,
    AggregationOptions,
    NewcomerOptions,
):
    title: ClassVar[str] = "privacy"

    privacy: Literal["none", "central", "local"] = option(
        "none",
        "Gaussian noise on clipped updates: central, a trusted server adds it to "
        "their mean; local, each client to its own before it sends it. Clients then "
        "have equal weights, whatever data they have",
        acts_on="uploads",
        told="always",
        off=True,
    )
    # Not to be confused with --clip, which limits gradients in local training.
    clip_norm: float = option(
        1.0,
        "C, the largest norm of an update, which is a client's row less what it was "
        "sent; longer ones are scaled down (--clip limits gradients, not updates)",
        gt=0,
        needs=_PRIVATE,
    )
    clip_per: Literal["update", "layer"] = option(
        "update",
        "what is clipped: whole updates to norm C, or each of L layers to C / √L, so "
        "that the norm of the whole is at most C (McMahan et al. 2018)",
        needs=_PRIVATE,
    )
    clip_quantile: float | None = option(
        None,
        "let C follow this quantile of the updates' norms, as in 0.5, from --clip-norm "
        "on (Andrew et al. 2021) (default: C stays)",
        gt=0,
        lt=1,
        needs=_CENTRAL,
    )
    clip_rate: float = option(
        0.2,
        "how fast C follows its quantile: the rate of its geometric steps",
        gt=0,
        needs=Need(
            "--privacy central --clip-quantile 0.5",
            lambda run: run.privacy == "central" and run.clip_quantile is not None,
        ),
    )
    noise_multiplier: float | None = option(
        None,
        "z, as in 0.8: the noise on the sum of updates (with local, on each update) "
        "has standard deviation z × C; 0: updates are only clipped, and no ε holds",
        zero=True,
        ge=0,
        needs=_PRIVATE,
    )
    target_epsilon: float | None = option(
        None,
        "ε after all rounds, as in 2: the run finds the noise that keeps within it; "
        "with local, for a client that takes part in every round",
        gt=0,
        le=100,
        needs=_PRIVATE,
    )
    delta: float | None = option(
        None,
        "δ, the probability with which ε may not hold, as in 1e-6 (default: the number "
        "of clients to the power of −1.1)",
        gt=0,
        lt=1,
        needs=(_ACCOUNTED, _NOISY),
    )
    accountant: Literal["pld", "rdp"] = option(
        "pld",
        "how ε is computed: by privacy loss distributions, which ask for less noise, or "
        "by Rényi divergences, which take no time",
        needs=(_ACCOUNTED, _NOISY),
    )
    privacy_population: int | None = option(
        None,
        "account as if rounds sampled from this many clients, as in 1000000 (default: "
        "--clients)",
        ge=1,
        needs=(_CENTRAL, _NOISY),
        calibration=LEFT_OUT,
    )
    noise_cohort: int | None = option(
        None,
        "account for rounds of this many clients, as in 1000, and scale the noise down to "
        "what it would be in their mean (default: the cohort)",
        ge=1,
        needs=(_CENTRAL, _NOISY),
        calibration=LEFT_OUT,
    )

    sample_noise: float | None = option(
        None,
        "DP-SGD within clients, as in 1.0: in each local step every sample's "
        "gradient is clipped to --sample-clip, and their sum gets noise of this many "
        "times the clip; needs --delta; 0: gradients are only clipped, and no ε "
        "holds (default: plain SGD)",
        zero=True,
        ge=0,
    )
    sample_clip: float = option(
        1.0,
        "DP-SGD: the largest norm of a sample's gradient",
        gt=0,
        needs=Need("--sample-noise 1", lambda run: run.sample_noise is not None),
    )

    @property
    def clips_alone(self) -> bool:
        """Whether updates are clipped but get no noise, so that no ε holds."""
        return self.privacy != "none" and self.noise_multiplier == 0

    @property
    def accounted_cohort(self) -> int:
        """The cohort size that the accountant assumes."""
        return self.noise_cohort or self.cohort_size

    @property
    def accounted_population(self) -> int:
        """The number of clients to sample from that the accountant assumes."""
        return self.privacy_population or self.clients

    @property
    def accounted_delta(self) -> float:
        """δ of the guarantee."""
        if self.delta is not None:
            return self.delta
        return float(self.accounted_population**-1.1)

    @property
    def hypothetical(self) -> bool:
        """Whether ε is accounted for a larger federation than the simulated one."""
        return bool(self.noise_cohort or self.privacy_population)


LEAST_BY_PLD = 0.1
"""The least noise multiplier that we let privacy loss distributions compute. It takes
8 s; half of it would take four times as long.
"""


def privacy_choices(config: PrivacyOptions) -> Iterable[Choice]:
    """Sample clients as the accountant assumes."""
    if config.privacy == "central" and config.sampling == "fixed":
        reason = "as ε is accounted for; --sampling fixed goes with --accountant rdp"
        yield Choice("sampling", "poisson", reason)


def check_privacy(config: PrivacyOptions, method: MethodTraits) -> None:
    """Refuse privacy without an amount of noise, or whose guarantee would not hold."""
    if config.sample_noise is not None:
        _check_samples(config)
    if config.privacy == "none":
        return
    flag = f"--privacy {config.privacy}"
    given = [config.noise_multiplier is not None, config.target_epsilon is not None]
    if sum(given) != 1:
        raise UserError(
            f"{flag} needs either --noise-multiplier, as in 0.8, or --target-epsilon, "
            "as in 2"
        )
    _check_method(config, method, flag)
    if config.clip_per == "layer":
        _check_layers(config, method)
    if config.privacy == "central":
        _check_mean(config)
    if config.new_rounds:
        raise UserError(
            f"{flag} does not cover --new-rounds, in which new clients send their "
            "updates as they are"
        )
    if config.clips_alone:
        # Without noise there is no guarantee to check.
        return
    _check_attack(config, flag)
    if config.accounted_delta >= 1:
        raise UserError(
            f"{flag}: δ is 1 with one client, and promises nothing; give --delta, as in "
            "1e-6"
        )
    if config.privacy == "central":
        _check_central(config)
    elif config.compress not in ("none", "randomk"):
        raise UserError(
            f"--privacy local, but --compress {config.compress} would pack updates by "
            "the size of their noise; use randomk"
        )


def _check_samples(config: PrivacyOptions) -> None:
    """Refuse DP-SGD together with --privacy, or without a δ."""
    if config.privacy != "none":
        raise UserError(
            f"--sample-noise protects samples, --privacy {config.privacy} protects "
            "clients; a run accounts for one of them only"
        )
    if config.new_rounds:
        raise UserError(
            "--sample-noise does not cover --new-rounds, in which new clients train "
            "without it"
        )
    if config.sample_noise and config.delta is None:
        raise UserError("--sample-noise needs --delta, as in 1e-5")


def _check_method(config: PrivacyOptions, method: MethodTraits, flag: str) -> None:
    if promises_of(config.method).private_mean:
        return
    raise UserError(
        f"{flag} would not hold: method {config.method} does more with uploads than "
        "one mean a round (use fedavg, fedadam, fedprox, fedper …; a method of yours "
        "that takes one says PRIVATE_MEAN = True in its file)"
    )


def _check_layers(config: PrivacyOptions, method: MethodTraits) -> None:
    """Refuse to clip by layer if uploads lack whole layers or C follows whole norms."""
    if config.clip_quantile is not None:
        raise UserError(
            "--clip-quantile follows the norms of whole updates; leave it out, or use "
            "--clip-per update"
        )
    if not method.whole_rows:
        raise UserError(
            f"--clip-per layer needs whole rows, but method {config.method} sends "
            "only some columns; use --clip-per update"
        )


def _check_attack(config: PrivacyOptions, flag: str) -> None:
    """Refuse attacks that send one client's update to the server more than once."""
    attack = ATTACKS.get(config.attack)
    if attack is not None and attack.reads_others:
        raise UserError(
            f"{flag} would not hold with --attack {config.attack}, which forges "
            "uploads from other clients' updates before these are clipped; use "
            "--attack sign-flip, or --noise-multiplier 0 to clip without an ε"
        )


def _check_mean(config: PrivacyOptions) -> None:
    """Refuse rules other than the mean: their noise is not that of a clipped sum."""
    if config.aggregation != "mean":
        raise UserError(
            f"--privacy central would not hold with --aggregation "
            f"{config.aggregation}, whose noise is not that of a mean; use --privacy "
            "local, or leave it out"
        )


def _check_central(config: PrivacyOptions) -> None:
    if config.oversample > 1:
        raise UserError(
            "--privacy central would not hold with --oversample: clients invited "
            "beyond the cohort are not accounted for; raise --cohort"
        )
    if config.sampling == "fixed" and config.trace is not None:
        raise UserError(
            "--privacy central does not account for --sampling fixed among the "
            "available clients of a trace; use --sampling poisson"
        )
    multiplier = config.noise_multiplier
    by_pld = config.accountant == "pld"
    if by_pld and multiplier is not None and multiplier < LEAST_BY_PLD:
        raise UserError(
            f"--noise-multiplier {multiplier:g}: ε is in the thousands, and takes "
            f"--accountant pld minutes; use rdp, or at least {LEAST_BY_PLD}"
        )
    if config.sampling == "fixed" and by_pld:
        raise UserError(
            "--accountant pld has no answer for --sampling fixed; use --sampling "
            "poisson, or --accountant rdp"
        )
    cohort, population = config.accounted_cohort, config.accounted_population
    if cohort < config.cohort_size:
        raise UserError(
            f"--noise-cohort {cohort} is smaller than the run's own cohort of "
            f"{count(config.cohort_size, 'client')}; raise it"
        )
    if cohort > population:
        name = "privacy_population" if config.privacy_population else "clients"
        raise UserError(
            f"rounds of {cohort:,} clients cannot be sampled from "
            f"{flag_of(name)} {population}; raise it, or lower --noise-cohort"
        )


Weighing = Literal["samples", "uniform"]


def weighs_by(config: PrivacyOptions, method: MethodTraits) -> Weighing:
    """Return how this run weights clients: as the user asks, or as the method does."""
    # The number of samples is private, too.
    if config.privacy != "none":
        return "uniform"
    return method.weighs if config.weights == "method" else config.weights


def check_weights(config: PrivacyOptions, method: MethodTraits) -> None:
    """Refuse --weights if clients upload nothing, or if sizes must stay private."""
    if config.weights == "method":
        return
    if not method.uploads:
        raise UserError(
            f"--weights {config.weights}: clients of method {config.method} send nothing "
            "that could be weighed"
        )
    if config.weights == "samples" and config.privacy != "none":
        raise UserError(
            f"--weights samples with --privacy {config.privacy}: this would reveal "
            "how many samples a client has; private clients have equal weights"
        )

"""Options of aggregation: how the server combines the uploads into one row."""

from typing import ClassVar, Literal

from hpcfed.errors import UserError, count
from hpcfed.options.declare import Need, option
from hpcfed.options.run import RunOptions
from hpcfed.options.traits import MethodTraits, promises_of

Rule = Literal["mean", "median", "trimmed-mean", "krum", "multi-krum", "sign-majority"]
# Robust rules see the uploads of all ranks; the mean needs one all-reduce.
RULES: dict[str, str] = {
    "mean": "mean of the uploads, weighted as the method says",
    "median": "the median of every column",
    "trimmed-mean": "the mean of every column without its largest and smallest values",
    "krum": "the one upload that is nearest to its neighbours",
    "multi-krum": "the mean of the uploads that are nearest to their neighbours",
    "sign-majority": "each column goes to the side of most clients, as with "
    "--compress sign",
}
"""Every aggregation rule with its line in `hpcfed list`."""

TOLERANT = ("trimmed-mean", "krum", "multi-krum")
"""Rules that expect a share of malicious uploads."""


class AggregationOptions(RunOptions):
    title: ClassVar[str] = "aggregation"

    on_bad_update: Literal["exclude", "stop"] = option(
        "exclude",
        "what to do with clients whose update is NaN or infinite: exclude and count "
        "them, or stop the run",
    )
    # `weights.weighs_by` says what "method" stands for.
    weights: Literal["method", "samples", "uniform"] = option(
        "method",
        "how clients are weighted in means: by their samples, or equally (uniform); "
        "method: as the method does it, mostly by samples",
        acts_on="means",
        stackable=True,
        also="weighting weighted client_weights weighted_average "
        "aggregation_weights fed_avg_weighting",
    )
    aggregation: Rule = option(
        "mean",
        "how the server combines the uploads into one row; sign-majority: each "
        "column goes to the side of most clients, as with --compress sign",
        acts_on="means",
        told="always",
        also="aggregate defense defence aggregation_rule robust",
    )
    # Below one half: no rule can tell a malicious majority from an honest one.
    tolerance: float = option(
        0.2,
        "share of the uploads that may be malicious: trimmed-mean drops this share at "
        "each end, krum expects it",
        ge=0,
        lt=0.5,
        also="trim trim_ratio byzantine_fraction",
        needs=Need(
            "--aggregation trimmed-mean", lambda run: run.aggregation in TOLERANT
        ),
    )
    krum_keep: int | None = option(
        None,
        "multi-krum: number of uploads in its mean (default: all but those that may "
        "be malicious)",
        ge=0,
        counts="uploads",
        zero_was_unset=True,
        needs=Need(
            "--aggregation multi-krum", lambda run: run.aggregation == "multi-krum"
        ),
    )


def expected_malicious(tolerance: float, uploads: int) -> int:
    """Return f of the robust rules: the number of uploads that may be malicious."""
    # 0.29 of 100 is 29, although 0.29 * 100 computes to 28.999999999999996.
    return int(tolerance * uploads + 1e-9)


def check_aggregation(config: AggregationOptions, method: MethodTraits) -> None:
    """Refuse a rule that the method cannot use, or that needs a larger cohort."""
    rule, uploads = config.aggregation, config.cohort_size
    if rule != "mean" and not method.averages:
        raise UserError(
            f"--aggregation {rule}, but method {config.method} takes no mean of all "
            "uploads"
        )
    if rule == "sign-majority" and not promises_of(config.method).votes:
        raise UserError(
            "--aggregation sign-majority votes once a round on rows that all start "
            f"from the same row, which method {config.method} does not do (use "
            "fedavg, fedadam, fedprox …; a method of yours says VOTES = True in its "
            "file)"
        )
    if config.krum_keep is not None and config.krum_keep > uploads:
        raise UserError(
            f"--krum-keep {config.krum_keep}, but a round has "
            f"{count(uploads, 'upload')}"
        )
    malicious = expected_malicious(config.tolerance, uploads)
    if rule == "trimmed-mean" and 2 * malicious >= uploads:
        raise UserError(
            f"--tolerance {config.tolerance} of {count(uploads, 'upload')} makes "
            "trimmed-mean drop all of them; lower it, or use --aggregation median"
        )
    # Krum's guarantee (Blanchard et al. 2017) needs n > 2f + 2.
    least = 2 * malicious + 3
    if rule in ("krum", "multi-krum") and uploads < least:
        raise UserError(
            f"{rule} needs at least {least} uploads to bear --tolerance "
            f"{config.tolerance}, a round has {uploads}; sample more clients or lower it"
        )

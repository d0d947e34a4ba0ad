"""Options of compression: how uploads and downloads are packed."""

from typing import ClassVar, Literal

from hpcfed.errors import UserError
from hpcfed.options.declare import Need, option
from hpcfed.options.run import RunOptions
from hpcfed.options.traits import MethodTraits

Compressing = Literal["none", "topk", "randomk", "qsgd", "sign", "powersgd"]
COMPRESSORS: dict[str, str] = {
    "none": "every column as it is",
    "topk": "the columns that change the most",
    "randomk": "columns drawn at random",
    "qsgd": "every column, rounded at random to a few levels",
    "sign": "the sign of every column, and a scale for every bucket of them",
    "powersgd": "matrices of low rank",
}
"""Every compressor with its line in `hpcfed list`."""

WITH_FEEDBACK = ("topk", "randomk", "sign", "powersgd")
"""Compressors that leave something out; error feedback sends it later. QSGD needs none:
its errors are 0 on average.
"""


def _packs_by(*kinds: str) -> Need:
    used = " or ".join(kinds)
    # Either direction will do: downloads are packed by the same options.
    return Need(f"--compress {used}", lambda run: bool(run.packings & set(kinds)))


class CompressionOptions(RunOptions):
    title: ClassVar[str] = "compression"

    compress: Compressing = option(
        "none",
        "how clients pack their updates: the largest or random columns (topk, "
        "randomk), columns rounded to a few levels (qsgd) or to their sign (sign), "
        "matrices of low rank (powersgd); as in --compress topk --keep 0.05",
        acts_on="uploads",
        told="always",
        off=True,
        also="compression compressor quantization sparsification",
    )
    compress_down: Compressing = option(
        "none",
        "how the server packs what it sends, by the same options; as in "
        "--compress-down qsgd",
        acts_on="downloads",
        told="always",
        off=True,
        also="compress_downlink downlink_compression server_compression",
    )
    keep: float = option(
        0.01,
        "topk, randomk: share of the columns that is sent",
        gt=0,
        le=1,
        also="sparsity topk_ratio keep_ratio compression_ratio",
        needs=_packs_by("topk", "randomk"),
    )
    # 2 × 15 + 1 values fill 5 bits.
    levels: int = option(
        15,
        "qsgd: levels of a column beside 0 and its sign",
        ge=1,
        le=2**15,
        also="quantization_levels",
        needs=_packs_by("qsgd"),
    )
    bucket: int = option(
        512,
        "qsgd, sign: columns that share a scale; 0: all of them",
        ge=0,
        needs=_packs_by("qsgd", "sign"),
    )
    # Not `rank`, which is a column of reports: the MPI rank.
    compress_rank: int = option(
        2,
        "powersgd: rank of the matrices",
        ge=1,
        le=2**15,
        also="powersgd_rank matrix_approximation_rank low_rank",
        needs=_packs_by("powersgd"),
    )
    feedback: bool = option(
        True,
        "a client adds what its packed updates have left out to its next one; without, "
        "randomk multiplies what it sends by columns / sent columns",
        also="error_feedback ef",
        needs=(
            Need(
                "--compress topk, randomk, sign or powersgd",
                lambda run: run.compress in WITH_FEEDBACK,
            ),
            Need("leaving --ef21 out", lambda run: not run.ef21),
        ),
    )
    ef21: bool = option(
        False,
        "in place of --feedback: a client packs the difference between its update and "
        "what the server has of it, and the server adds that up (EF21, Richtárik et al. "
        "2021)",
        needs=Need("--compress topk", lambda run: run.compress != "none"),
    )

    @property
    def packings(self) -> set[str]:
        """The compressors of both directions."""
        return {self.compress, self.compress_down}


def packing(kind: str, config: CompressionOptions) -> str:
    """Describe in words what this compressor does."""
    share = f"{100 * config.keep:g} % of the columns"
    scales = f"buckets of {config.bucket}" if config.bucket else "one bucket"
    return {
        "topk": f"the largest {share}",
        "randomk": f"random {share}",
        "qsgd": f"QSGD with {config.levels} levels, {scales}",
        "sign": f"scaled signs, {scales}",
        "powersgd": f"PowerSGD of rank {config.compress_rank}",
    }[kind]


def check_compression(config: CompressionOptions, method: MethodTraits) -> None:
    """Refuse to compress what is never sent, or rows that not only receivers use."""
    up, down = config.compress, config.compress_down
    for flag, kind in (("--compress", up), ("--compress-down", down)):
        if kind != "none" and not method.uploads:
            raise UserError(
                f"{flag} {kind}, but clients of method {config.method} neither send "
                "nor get anything"
            )
    if "powersgd" in (up, down) and not method.whole_rows:
        raise UserError(
            f"powersgd needs whole rows, but method {config.method} sends only some "
            "columns; use --compress topk"
        )
    if config.ef21 and method.asynchronous:
        raise UserError(
            f"--ef21: uploads of method {config.method} come late, and the server would "
            "add up differences that it does not have yet; use --feedback"
        )
    if down != "none" and method.asynchronous:
        raise UserError(
            f"--compress-down {down}: clients of method {config.method} start from "
            "older rows, for which the server has no packed differences"
        )
    if down != "none" and method.unsampled_train:
        raise UserError(
            f"--compress-down {down}: clients of method {config.method} that were not "
            "sampled train from the server's own row, not from what they were sent "
            "of it"
        )

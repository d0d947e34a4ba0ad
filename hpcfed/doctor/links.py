"""Messages and collectives between ranks: whether they arrive, with right numbers, and
how fast.
"""

from collections.abc import Mapping
from statistics import median

from hpcfed.doctor.finding import Finding, error, fine, ranks_text, warning
from hpcfed.runtime.probes import Passed, TimedCollective
from hpcfed.words import bytes_text, seconds_text

SLOW_LINK = 0.25
"""A link below this share of the others' median is slow: messages of all ranks at once
vary.
"""
FEWEST = 3
"""Other links to compare one with: fewer say little."""
WRONG = (
    "do not trust results of these ranks: try another fabric (--backend gloo, "
    "NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1), and tell your administrators"
)


def judge_messages(ranks: Mapping[int, Passed | None]) -> list[Finding]:
    """Judge messages over MPI; None from a rank to which they did not come."""
    found = []
    lost = [rank for rank, passed in ranks.items() if passed is None]
    if lost:
        advice = (
            "see whether MPI finds its network: mpirun --mca btl tcp,self, UCX_TLS=tcp"
        )
        found.append(error("MPI messages", "they do not arrive", advice, *lost))
    passed = {rank: one for rank, one in ranks.items() if one is not None}
    for rank, one in passed.items():
        if not one.right:
            told = f"from rank {one.source}: wrong numbers"
            found.append(error("MPI messages", told, WRONG, rank))
    for rank, one in passed.items():
        others = [own.bytes_per_second for at, own in passed.items() if at != rank]
        if len(others) < FEWEST:
            continue
        share = one.bytes_per_second / median(others)
        if share < SLOW_LINK:
            speed = f"{bytes_text(one.bytes_per_second)}/s"
            told = f"from rank {one.source}: {speed}, {share:.0%} of the other ranks'"
            advice = "see whether this node uses the fast network, as the others do"
            figures = {"bytes_per_second": one.bytes_per_second, "share": share}
            found.append(warning("MPI messages", told, advice, rank, **figures))
    if found:
        return found
    slowest = min(one.bytes_per_second for one in passed.values())
    latency = max(one.latency for one in passed.values())
    text = _text(latency, slowest)
    told = f"{text} between the slowest neighbours"
    figures = {"seconds": latency, "bytes_per_second": slowest}
    return [fine("MPI messages", told, **figures)]


def judge_exchanges(
    ranks: Mapping[int, list[TimedCollective]], backend: str
) -> list[Finding]:
    """Judge collectives by torch.distributed."""
    found = []
    kinds = {(one.kind, one.scope): one for own in ranks.values() for one in own}
    for kind, scope in kinds:
        name = f"{kind}, {scope}"
        took = {}
        for rank, own in ranks.items():
            for one in own:
                if (one.kind, one.scope) == (kind, scope):
                    took[rank] = one
        wrong = [rank for rank, one in took.items() if not one.right]
        if wrong:
            told = f"wrong numbers over {backend}"
            found.append(error(name, told, WRONG, *wrong))
            continue
        # Ranks of one collective end together; of several, the slowest counts.
        slowest = min(took, key=lambda rank: took[rank].bytes_per_second)
        one = took[slowest]
        text = _text(one.latency, one.bytes_per_second)
        where = f" ({ranks_text([slowest])})" if scope == "within nodes" else ""
        told = f"{text} over {backend}, {one.ranks} ranks{where}"
        figures = {"seconds": one.latency, "bytes_per_second": one.bytes_per_second}
        if one.ranks == 1:
            told, figures = f"{backend} starts", {}
        found.append(fine(name, told, **figures))
    return found


def _text(latency: float, speed: float) -> str:
    return f"right numbers, {seconds_text(latency)}, {bytes_text(speed)}/s"

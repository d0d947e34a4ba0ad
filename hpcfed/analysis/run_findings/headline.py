"""A run in one line: what was run on what, and how far it has come."""

from hpcfed.errors import count, printable
from hpcfed.results.run import RunRecord


def title(record: RunRecord) -> str:
    """Return what was run on what."""
    facts = record.facts
    ranks = count(facts["ranks"], "rank")
    server_ranks = record.config.get("server_ranks")
    if server_ranks:
        ranks += f" and {count(server_ranks, 'server rank')}"
    return (
        f"{facts['method']} on {facts['dataset']} ({record.config['partition']}): "
        f"{count(facts['clients'], 'client')} on {ranks}, "
        f"{facts['model']} with {facts['columns']:,} columns"
    )


def status(record: RunRecord) -> str:
    """Return how many rounds a run has done, and why it did not do more."""
    planned = record.config["rounds"]
    line = f"status: {record.status}, "
    line += f"{record.rounds_done} of {count(planned, 'round')}"
    if record.status == "complete" and record.rounds_done < planned:
        line += f", {_why_early(record)}"
    return f"{line}: {record.error}" if record.error else line


def _why_early(record: RunRecord) -> str:
    """Return why a complete run has fewer rounds than planned."""
    if "ended" in record.facts:
        return printable(str(record.facts["ended"]))
    # Records of older versions do not say. Only reaching the target and running out of
    # patience complete a run early.
    return "stopped early" if _lost_patience(record) else "stopped at the target"


def _lost_patience(record: RunRecord) -> bool:
    """Tell whether a run ended early because it no longer improved."""
    if record.config.get("early_stop") is None:
        return False
    reached = record.reached() if record.config.get("stop_at_target") else None
    return reached is None or reached.rounds != record.rounds_done

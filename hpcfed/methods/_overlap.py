"""Learning of the server that clients do not wait for, and what becomes of its rows."""

from hpcfed.methods._generating import Options
from hpcfed.methods._interface import Cohort, Federation, Positions, Tensor


def begin_learning(
    fed: Federation[Options], cohort: Cohort, *, w: Tensor, starts: Tensor
) -> None:
    """Let the server learn from what is banked, while clients go on. `w` is FedAvg's
    row; `starts` are what generated updates will be added to.
    """
    if fed.options.bank_of == "uploads":
        starts = w.new_zeros(())
    fed.begin_learning(cohort, starts=starts, row=w[fed.generated])


def late_columns(
    fed: Federation[Options], cohort: Cohort, *, w: Tensor, starts: Tensor
) -> tuple[Tensor, Positions]:
    """Return columns that the server has generated meanwhile for this rank's clients,
    and which clients it knows; the others get those of `w`, FedAvg's row.

    Generated updates have moved along with FedAvg's row.
    """
    late = fed.finish_learning(cohort)
    columns, row = late.columns, w[fed.generated]
    with fed.timed("server"):
        if fed.options.bank_of == "updates":
            moved = row - late.row
            columns = columns + moved
            if cohort.round + 1 == fed.config.rounds:
                # Nothing was banked since. What `finals` compares moves along, too.
                starts.add_(moved)
        columns[~late.known] = row
        return columns, late.known

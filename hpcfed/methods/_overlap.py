"""What becomes of rows that the server generates while clients go on."""

from hpcfed.methods._interface import Cohort, Federation, Positions, Tensor


def late_columns(
    fed: Federation, cohort: Cohort, *, w: Tensor, starts: Tensor
) -> tuple[Tensor, Positions]:
    """Return columns that the server has generated for this rank's clients since it
    began to learn, and which clients it knows; the others get those of `w`, FedAvg's row.

    They have moved along with FedAvg's row, and so do `starts` after the last round:
    what is compared with generated rows then is moved as well.
    """
    late = fed.finish_learning(cohort)
    columns, row = late.columns, w[fed.generated]
    with fed.timed("server"):
        moved = row - late.row
        columns = columns + moved
        # Starts are still those of the learning: nothing was banked since.
        if cohort.round + 1 == fed.config.rounds:
            starts.add_(moved)
        columns[~late.known] = row
        return columns, late.known

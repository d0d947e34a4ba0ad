"""What does not fit the rounds of a run is refused; imports no torch."""

from hpcfed.errors import UserError, count


def check_rounds(*, bank_rounds: int, every: int, overlap: int, rounds: int) -> None:
    """Refuse --bank-rounds, --server-every and --server-overlap that do not fit the
    run's rounds.
    """
    for flag, asked, most in (
        ("--bank-rounds", bank_rounds, rounds),
        ("--server-every", every, rounds),
        # The server begins after a round.
        ("--server-overlap", overlap, rounds - 1),
    ):
        if asked > most:
            raise UserError(
                f"{flag} {asked}, but the run has only {count(rounds, 'round')}"
            )
    if not every:
        return
    # The server learns one thing at a time.
    if overlap > every:
        raise UserError(
            f"--server-overlap {overlap} is more than --server-every {every}: the server "
            "would have to learn twice at once"
        )
    left = rounds % every
    if 0 < left < overlap:
        raise UserError(
            f"--server-overlap {overlap}: the last two learnings would overlap, since "
            f"{rounds} rounds are not a multiple of --server-every {every}; use "
            f"--rounds {rounds - left + every}"
        )

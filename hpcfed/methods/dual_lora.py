"""Two adapters beside each layer, as in FedDPA (Yang et al. 2024): one is averaged, the
other stays with its client; both are trained together.

W + (α / r) (B A + Bᵢ Aᵢ). Of the r components of --lora, the last --personal-rank ones
are Bᵢ Aᵢ. The paper weighs the two for each test sample anew; here they are added.
"""

from hpcfed.errors import UserError
from hpcfed.methods import Cohort, Federation, _adapters, _partial
from hpcfed.methods._adapters import components, rank_of
from hpcfed.methods._partial import State, aggregate, download
from hpcfed.options import RunConfig, option

EXTENDS = _partial
PRIVATE_MEAN = True


class Options(_adapters.Options):
    personal_rank: int | None = option(
        None,
        "components of --lora that stay with each client (default: half of them)",
        ge=0,
        zero=True,
    )

    def check(self, config: RunConfig) -> None:
        personal, rank = self.personal_rank, config.lora
        if personal is not None and rank is not None and personal >= rank:
            raise UserError(
                f"--personal-rank {personal} leaves nothing to share of --lora {rank}; "
                "give a smaller one"
            )
        # Runs of older versions may still go on.
        if personal is None and rank == 1 and config.resume is None:
            raise UserError(
                "--lora 1 has no half to stay with each client; use --lora 2 or more, or "
                "--personal-rank 0 to share it"
            )


def init(fed: Federation[Options]) -> State:
    rank = rank_of(fed)
    personal = fed.options.personal_rank
    if personal is None:
        personal = rank // 2
    return _partial.begin(fed, shared=components(fed.layout) <= rank - personal)


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    rows = download(fed, state, cohort)
    rows = fed.train(rows, cohort)
    return aggregate(fed, state, rows, cohort)

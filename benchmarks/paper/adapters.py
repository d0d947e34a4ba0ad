"""Methods that treat adapters in different ways, on real text: perplexity over rounds, and
what clients send for it.

A small GPT first learns the texts as a whole network (FedAvg, --base-rounds). Then every
method goes on with adapters over it, for all seeds at once. Runs that are complete stay
as they are; if their options differ from those asked for, nothing is run. The table has
the mean over seeds ± its standard error: of the clients' perplexity on their own test
texts, and of the global model's on all of them. Bytes are the mean over seeds.

examples:
  python -m benchmarks.paper.adapters --text sotu --out runs/adapters
  python -m benchmarks.paper.adapters --text sotu --out runs/few --base-rounds 2 --rounds 2 \\
      --set cohort=4 text_length=32 --model '{"width": 16, "depth": 1, "heads": 2}'
"""

import argparse
from collections.abc import Sequence
from math import nan
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks.arguments import add_device, parser_of
from benchmarks.paper.cells import flag_words, pairs_of
from benchmarks.paper.pictures import estimate
from hpcfed import cli
from hpcfed.errors import UserError
from hpcfed.experiment.run import run
from hpcfed.options import check_unchanged
from hpcfed.options.run import seed_folder
from hpcfed.results.run import RunRecord
from hpcfed.results.stored import is_complete, read_run
from hpcfed.words import bytes_text

METHODS = (
    "fedavg", "ffa-lora", "flexlora", "fedex-lora", "fedsa-lora", "dual-lora", "hetlora",
)  # fmt: skip
TABLE = "table.md"
COMMON = {
    "model": "benchmarks/examples/gpt.py:GPT",
    "cohort": "24",
    "epochs": "1",
    "batch_size": "16",
    "optimiser": "adamw",
}
"""Options of all runs; --set wins over these and those below."""
WHOLE = {"lr": "0.001", "method": "fedavg", "seed": "0"}
OWN = {"rounds", "method", "seed", "seeds", "init", "out"}
"""Options that belong to this program."""
ADAPTED = {"lr": "0.003", "lora": "8", "lora_layers": "blocks.*"}
"""The head is tied to the table of tokens, which fedex-lora must not change."""


def main() -> None:
    """Make the runs that are missing, and print the table; OUT/table.md has it, too."""
    asked = _parse()
    try:
        common = COMMON | {"dataset": f"text:{asked.text}", "device": asked.device}
        common |= {"model_options": asked.model} if asked.model else {}
        given = {}
        for name, value in pairs_of("--set", asked.set, "cohort=8").items():
            given[name.replace("-", "_")] = value
        if given.keys() & OWN:
            named = ", ".join(sorted(given.keys() & OWN))
            raise UserError(f"--set {named}: this program sets that itself")
        # The base has no adapters.
        of_base = {n: v for n, v in given.items() if not n.startswith("lora")}
        base = asked.out / "base"
        whole = WHOLE | {"rounds": str(asked.base_rounds)}
        _complete(base, common | whole | of_base)
        for method in asked.methods:
            own = {
                "init": str(base), "method": method, "rounds": str(asked.rounds),
                "evaluate_every": str(max(1, asked.rounds // asked.points)),
                "seeds": ",".join(map(str, asked.seeds)),
            }  # fmt: skip
            _complete(asked.out / method, common | ADAPTED | own | given)
        found = "\n".join(table(asked.out, asked.methods, asked.seeds))
        (asked.out / TABLE).write_text(f"{found}\n", encoding="utf-8")
        print(found)
    except UserError as error:
        raise SystemExit(f"adapters.py: {error}") from None


def _complete(folder: Path, options: dict[str, str]) -> None:
    """Make a run, unless it is there; one that was stopped begins anew. Refuse to take
    or to overwrite one with other options.
    """
    words = [*flag_words(options), f"--out={folder}", "--overwrite"]
    settings = cli.parse_run(words)
    there = []
    for one in settings.each_seed():
        # With --seeds each has a folder of its own.
        of_seed = settings.config.seeds is not None
        path = seed_folder(folder, one.config.seed) if of_seed else folder
        there.append(path.is_dir() and is_complete(path))
        if there[-1]:
            check_unchanged(path, read_run(path).config, one.flat())
    if not all(there):
        run(settings)


def table(out: Path, methods: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Return a line for each method: perplexities at some rounds, and bytes."""
    lines: list[str] = []
    for method in methods:
        runs = [read_run(seed_folder(out / method, seed)) for seed in seeds]
        judged = np.flatnonzero(np.isfinite(runs[0].rounds["perplexity"])).tolist()
        if not lines:
            after = " | ".join(f"after {round + 1}" for round in judged)
            lines = [
                f"| method | {after} | global | sent by clients | sent to them |",
                "|---|" + "---:|" * (len(judged) + 3),
            ]
        cells = [_cell([_at(one, "perplexity", i) for one in runs]) for i in judged]
        cells.append(_cell([_at(one, "global_perplexity", judged[-1]) for one in runs]))
        for way in ("bytes_up", "bytes_down"):
            cells.append(bytes_text(mean(float(one.rounds[way].sum()) for one in runs)))
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return lines


def _at(one: RunRecord, name: str, round: int) -> float:
    """Return a figure of a round; NaN if the method has none."""
    found = one.rounds.get(name)
    return nan if found is None else float(found[round])


def _cell(values: Sequence[float]) -> str:
    """Return the mean ± its standard error; a dash without values."""
    if not np.isfinite(values).all():
        return "–"
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return "{:.3f} ± {:.3f}".format(*estimate(values))


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--text", required=True, help="folder with a text per client")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--base-rounds", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--points", type=int, default=5, help="evaluations of a run")
    parser.add_argument("--model", help="keywords of the GPT, as JSON")
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION=VALUE")
    add_device(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Draw combinations of options, each as a user could type it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal

from pydantic.fields import FieldInfo

from benchmarks.swarm import neutral, values
from benchmarks.swarm.neutral import Neutral
from hpcfed import methods
from hpcfed.cli import keyword_settings
from hpcfed.errors import UserError
from hpcfed.options import RunConfig
from hpcfed.options.checks import AllOptions, check
from hpcfed.options.declare import facts_of, flags
from hpcfed.runtime.launcher import Launch

Options = dict[str, Any]
Relation = Literal["alone", "ranks", "seeds", "resume", "off", "names"]
RELATIONS: dict[Relation, float] = {
    "alone": 4,
    "ranks": 3,
    "seeds": 1,
    "resume": 4,
    "off": 3,
    "names": 2,
}
"""What a run is compared with, and how often."""
OWN: dict[str, Options] = {
    "apfl": {"local_steps": 2},
    "fedrep": {"head_epochs": 1, "body_epochs": 1},
    "per-fedavg": {"local_steps": 2},
    "pfedgpa": {
        "server": "small",
        "server_latent": 4,
        "server_engine": "torch",
        "autoencoder_samples": 40,
        "denoiser_samples": 40,
        "server_batch": 20,
        "diffusion_steps": 20,
        "inversion_depth": 5,
        "bank_rounds": 2,
    },
    "pfedhn": {"inner_steps": 2, "hn_hidden": 5},
    "pfedme": {"local_rounds": 2, "pfedme_steps": 2},
}
"""Methods whose usual settings would take long. Others need no line here."""
PLACED = ("pfedhn",)
"""Methods that draw an embedding for all clients at once."""
REPAIRS = 12
"""So often a refused combination is changed before it stays as it is."""
REFUSED = 0.08
"""How often it stays as it is at once, since refusals are judged, too."""
OWNED = "owners.npz"
"""The file whose clients change their names."""
OWNERS = 5
"""Its clients."""
_FLAG = re.compile(r"--(?:no-)?([a-z][a-z0-9-]*)(?: ([\w.,:-]+))?")


@dataclass(frozen=True)
class Case:
    """A combination of options, and what its run is compared with."""

    options: Options
    relation: Relation = "alone"
    ranks: int = 1
    """Ranks of the first run."""
    others: int = 1
    """Ranks of the second run, or on which the first one goes on."""
    more: Options = field(default_factory=dict)
    """Options that only the second run has."""
    stop_after: int = 0
    """In which round it is stopped, counted from 1."""
    neutral: tuple[Neutral, ...] = ()
    """Under `off`: what the first run has beside FedAvg's options."""
    names: tuple[int, ...] = ()
    """Under `names`: the client whose samples client i gets."""
    kept: frozenset[str] = frozenset()
    """Options without which the comparison would not hold."""

    def first(self) -> Options:
        """Return the options of the first run."""
        return self._with(part.options for part in self.neutral)

    def fedavg(self) -> Options:
        """Return the options of the FedAvg that it should equal."""
        made = self._with(part.fedavg for part in self.neutral)
        uniform = methods.load(str(self.first()["method"])).Options.weighs == "uniform"
        if uniform and "weights" not in made:
            made |= neutral.UNIFORM
        return made | {"method": "fedavg"}

    def _with(self, more: Iterable[Options]) -> Options:
        """Return the options of both runs, and then those of one of them."""
        made = dict(self.options)
        for options in (*(part.both for part in self.neutral), *more):
            made |= options
        return made


def words(options: Mapping[str, Any]) -> list[str]:
    """Return the command line of a run."""
    return ["run", *flags(options)]


def refusal(options: Mapping[str, Any], ranks: int = 1) -> str:
    """Return why a run is refused before it starts; empty: it is not."""
    try:
        check(keyword_settings(options), Launch("the swarm", 0, ranks))
    except UserError as error:
        return str(error)
    return ""


def fields_of(method: str) -> dict[str, FieldInfo]:
    """Return all options that a run of this method has."""
    return {**RunConfig.model_fields, **methods.load(method).Options.model_fields}


def switches() -> frozenset[str]:
    """Return the options that others need in order to act."""
    found = set()
    for declared in fields_of("fedavg").values():
        for need in facts_of(declared).needs:
            if isinstance(need.wanted, str):
                found |= {name.replace("-", "_") for name, _ in _named(need.wanted)}
    return frozenset(found & {*RunConfig.model_fields})


def _named(text: str) -> list[tuple[str, str]]:
    return _FLAG.findall(text)


SIZES = frozenset({"clients", "rounds", "epochs", "batch_size", "model", "method"})
"""Options that every combination has, so that its runs are small."""

REPLACED = frozenset({"epochs", "batch_size"})
"""Sizes that a method may replace by its own."""


def draw(random: Random) -> Case:
    """Return a combination, and what to compare it with."""
    relation = random.choices([*RELATIONS], [*RELATIONS.values()])[0]
    if relation == "off":
        return _draw_off(random)
    method = random.choice(values.TEXTS["method"])
    if relation == "names" and not _has_no_places(method):
        relation = "alone"
    options = _sizes(random, method)
    fixed = _needed(random, relation, method)
    options |= fixed
    _fill(random, options, frozenset(fixed))
    case = _related(random, relation, _repaired(random, options, frozenset(fixed)))
    return replace(case, kept=frozenset(fixed))


def _sizes(random: Random, method: str) -> Options:
    made: Options = {
        "method": method,
        "clients": random.randint(2, 6),
        "rounds": random.randint(1, 3),
        "epochs": random.choice([1, 1, 1, 2]),
        "batch_size": random.choice([20, 40, 64]),
        "model": random.choice(["mlp", "mlp", "mlp", "mlp", "cnn-digits", "cnn-bn"]),
        "seed": random.randrange(1000),
    }
    if random.random() < 0.7:
        made |= FEW_SAMPLES
    return {**made, **OWN.get(method, {})}


FEW_SAMPLES: Options = {
    "dataset": "synthetic",
    "synthetic_shape": "1x8x8",
    "train_per_client": 40,
    "test_per_client": 10,
}
EXACT: Options = {"precision": "fp64", "snapshot_every": 1}
"""So that runs can be compared: rounding does not grow, and rows are kept."""


def _needed(random: Random, relation: Relation, method: str) -> Options:
    """Return the options that a comparison needs."""
    match relation:
        case "alone":
            return {}
        case "resume":
            rounds = random.randint(2, 4)
            made: Options = {"deterministic": True, "rounds": rounds}
            return {**made, "snapshot_every": 1}
        case "names":
            return {**EXACT, **neutral.ALL, **_nameless(method)}
        case _:
            return dict(EXACT)


def _has_no_places(method: str) -> bool:
    """Tell whether a client's random numbers are keyed by its number alone, and not by
    its place in a draw for all clients.
    """
    traits = methods.load(method).Options
    return not (traits.asynchronous or traits.has_server or method in PLACED)


def _nameless(method: str) -> Options:
    """Return options with which no draw is about all clients in their order."""
    declared = methods.load(method).Options.model_fields
    made: Options = {
        "dataset": f"file:{OWNED}",
        "partition": "natural",
        "clients": OWNERS,
        "attack": "none",
        "devices": "none",
        "new_clients": 0,
        "evaluate_clients": 0,
        # It moves rows by their clients' numbers.
        "simulate_training": 0,
    }
    for name, value in {"clusters": 1, "ties": "loss", "client_ranks": "2"}.items():
        if name in declared:
            made[name] = value
    return made


def _fill(random: Random, options: Options, fixed: frozenset[str]) -> None:
    """Draw switches, then options whose needs they meet, then a few at random."""
    fields = fields_of(str(options["method"]))
    drawn = [
        name
        for name, declared in fields.items()
        if values.is_drawn(declared) and name not in fixed | SIZES
    ]
    of_others = switches()
    own = methods.load(str(options["method"])).Options.model_fields
    for name in drawn:
        if name in of_others and random.random() < 0.1:
            options[name] = values.draw(random, name, fields[name])
    met = _met(options)
    for name in drawn:
        if name in options or name in of_others:
            continue
        chance = 0.15 if name in own else 0.02
        if facts_of(fields[name]).needs:
            chance = 0.3 if name in met else 0.003
        if random.random() < chance:
            options[name] = values.draw(random, name, fields[name])


def _met(options: Options) -> set[str]:
    """Return the options that would act in this run."""
    try:
        settings = keyword_settings(options)
    except UserError:
        return set()
    run = AllOptions(settings.config, settings.options)
    fields, found = settings.fields(), set()
    for name, declared in fields.items():
        needs = facts_of(declared).needs
        if needs and all(need.met(run) for need in needs):
            found.add(name)
    return found


def _repaired(random: Random, options: Options, fixed: frozenset[str]) -> Options:
    """Return a combination that is not refused, as far as the messages help."""
    if random.random() < REFUSED:
        return options
    tried: set[str] = set()
    made = dict(options)
    for _ in range(REPAIRS):
        said = refusal(without_files(made))
        if not said:
            break
        _mend(random, made, said, tried, fixed)
    return made


def without_files(options: Options) -> Options:
    """Return the options with digits in the place of a file that is not there yet."""
    made = dict(options)
    if str(made.get("dataset", "")).startswith("file:"):
        made |= {"dataset": "digits", "partition": "iid"}
    return made


def _mend(
    random: Random, options: Options, said: str, tried: set[str], fixed: frozenset[str]
) -> None:
    """Do what a message advises, or leave out an option that it names."""
    fields = fields_of(str(options["method"]))
    advised = [
        (name.replace("-", "_"), text.strip(",.;:"))
        for name, text in _named(said)
        if name.replace("-", "_") in fields
    ]
    for name, text in advised:
        is_value = text and text not in ("above", "below", "or", "and", "is")
        if not is_value or name in tried | fixed | SIZES or name in options:
            continue
        if facts_of(fields[name]).study_sets or not values.is_drawn(fields[name]):
            continue
        tried.add(name)
        options[name] = text
        return
    named = [name for name, _ in advised if name in options and name not in fixed]
    named = [name for name in named if name not in SIZES or name in REPLACED]
    free = [name for name in options if name not in fixed | SIZES]
    if named or free:
        name = named[0] if named else random.choice(free)
        tried.add(name)
        del options[name]


def _related(random: Random, relation: Relation, options: Options) -> Case:
    """Return the case of a comparison, with what it draws for itself."""
    case = Case(options, relation)
    match relation:
        case "ranks":
            serves = methods.load(str(options["method"])).Options.has_server
            # `OWN` has an engine that learns on one rank.
            return replace(case, others=2, more={"server_ranks": 1} if serves else {})
        case "resume":
            stop = random.randint(1, max(1, int(options["rounds"]) - 1))
            ranks, others = random.choice([(1, 1), (1, 1), (1, 1), (2, 2)])
            return replace(case, ranks=ranks, others=others, stop_after=stop)
        case "names":
            names = random.sample(range(OWNERS), OWNERS)
            return replace(case, names=tuple(names))
        case _:
            return case


def _draw_off(random: Random) -> Case:
    """Return FedAvg with a method that equals it, and stages that change nothing."""
    method = random.choice([*neutral.METHODS])
    options = _sizes(random, "fedavg") | EXACT | {"model": "mlp", "clients": 5}
    for name in ("participation", "momentum", "lr", "optimiser", "partition", "alpha"):
        if random.random() < 0.3:
            options[name] = values.draw(random, name, RunConfig.model_fields[name])
    options = _repaired(random, options, frozenset(EXACT) | SIZES)
    own = OWN.get(method, {})
    first = neutral.METHODS[method]
    parts = [replace(first, options={"method": method, **own, **first.options})]
    stages = [*neutral.STAGES, *_declared_off(random)]
    for part in random.sample(stages, random.randint(0, 3)):
        more = Case(options, "off", neutral=(*parts, part))
        if not _clash(parts, part) and not refusal(more.first()):
            parts.append(part)
    return Case(options, "off", neutral=tuple(parts), kept=frozenset(EXACT))


def _declared_off(random: Random) -> list[Neutral]:
    """Return options that change nothing in the results by their declaration."""
    found = []
    for name, declared in RunConfig.model_fields.items():
        if values.is_drawn(declared) and facts_of(declared).changes in (
            "time",
            "nothing",
        ):
            found.append(Neutral({name: values.draw(random, name, declared)}))
    return found


def _clash(parts: list[Neutral], part: Neutral) -> bool:
    """Tell whether two parts set the same option."""
    there: set[str] = set()
    for other in parts:
        there |= other.options.keys() | other.both.keys() | other.fedavg.keys()
    same = there & (part.options.keys() | part.both.keys() | part.fedavg.keys())
    return bool(same)

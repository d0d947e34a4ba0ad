"""A method of the user's: what its functions draw follows from the seed, and what they
return is checked.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial, wraps
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcfed import methods
from hpcfed.errors import UserError
from hpcfed.experiment.materials import dtype_of
from hpcfed.federation.cohort import Cohort
from hpcfed.federation.federation import Federation
from hpcfed.methods import Method
from hpcfed.methods._interface import AtDepth
from hpcfed.options import RunConfig, flag_of, named
from hpcfed.runtime import draws, randomness

Refuse = Callable[[str], None]
"""Ends the run, given what a function must return."""
OURS = "hpcfed.methods."
"""Modules whose functions draw no numbers of their own, and have tests."""
STREAMS = ("finals", "figures", "depths")
"""Functions that yield what they find, one after the other."""

NO_PART = ("none", "label-flip", "mean", "method")
"""Values that leave channel and means alone; flipped labels are changed before."""


def load_method(config: RunConfig, fed: Federation) -> Method:
    """Return the run's method. If it is the user's, its functions are seeded by (seed,
    round, function), alike on all ranks, and refused if they return what is of no use.
    """
    method = methods.load(config.method)
    if config.method in methods.names():
        return method
    watch = _Watch(config, fed, method)
    own: dict[str, Any] = {}
    for hook in methods.HOOKS:
        function = getattr(method, hook)
        module = getattr(function, "__module__", None) or ""
        if function is not None and not module.startswith(OURS):
            watched = watch.stream if hook in STREAMS else watch.function
            own[hook] = watched(hook, function)
    return replace(method, **own)


class _Watch:
    """Calls the functions of a user's method."""

    def __init__(self, config: RunConfig, fed: Federation, method: Method) -> None:
        self._config = config
        self._fed = fed
        self._method = method
        self._written = 0
        """How often the global row before the round had been written in place."""

    def function(self, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, seeded and checked."""
        check = getattr(self, f"_check_{hook}")
        own = draws.taken_from_outside(draws.functions_of(function))

        @wraps(function)
        def called(*arguments: Any) -> Any:
            drawn = {name: draws.state_of(own[name]) for name in own}
            if hook == "round":
                self._written = self._version(arguments[1])
            with self._seeded(hook, arguments):
                found = function(*map(_watched, arguments))
            for name in own:
                if draws.state_of(own[name]) != drawn[name]:
                    self._refuse_draws(hook, name)
            check(partial(self._refuse, hook, found), found, *arguments)
            return found

        return called

    def stream(self, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that yields, seeded and checked for each item."""
        check = getattr(self, f"_check_{hook}")

        @wraps(function)
        def called(*arguments: Any) -> Iterator[Any]:
            with self._seeded(hook, arguments):
                found = function(*arguments)
            if not isinstance(found, Iterator):
                self._refuse(hook, found, "nothing: it must yield what it finds")
            for number in count(1):
                with self._seeded(hook, arguments, number):
                    item = next(found, self)
                if item is self:
                    return
                check(partial(self._refuse, hook, item), item, *arguments)
                yield item

        return called

    def _seeded(self, hook: str, arguments: tuple[Any, ...], item: int = 0) -> Any:
        fed = self._federation(*arguments)
        purpose = f"{hook} of the user's method"
        generator = randomness.generator(
            self._config.seed, purpose, fed.round + 1, item
        )
        return draws.seeded(int(generator.integers(2**32)), fed.device)

    def _federation(self, first: Any, *others: Any) -> Federation:
        """Return the federation that a function works for: the run's, or new clients'.
        Only `global_row` is not given one.
        """
        return first if isinstance(first, Federation) else self._fed

    def _version(self, state: Any) -> int:
        """Return how often the global row has been written in place, as far as torch
        counts.
        """
        row = self._method.global_row(state)
        if not isinstance(row, Tensor) or row.is_inference():
            return 0
        return row._version

    def _refuse_draws(self, hook: str, name: str) -> None:
        raise UserError(
            f"method {self._config.method}: {hook} draws from its own generator {name}, "
            "which neither a resumed run nor other seeds could repeat; draw from "
            "fed.generator(\"purpose\", fed.round), or from torch's, numpy's or Python's "
            "own"
        )

    def _refuse(self, hook: str, found: Any, wanted: str) -> None:
        verb = "yields" if hook in STREAMS else "returns"
        raise UserError(
            f"method {self._config.method}: {hook} {verb} {_said(found)}; it must "
            f"{verb[:-1]} {wanted}"
        )

    # What each function must return.

    def _check_init(self, refuse: Refuse, state: Any, fed: Federation) -> None:
        self._check_state(refuse, state)

    def _check_adopt(self, refuse: Refuse, state: Any, *_: Any) -> None:
        self._check_state(refuse, state)

    def _check_round(
        self, refuse: Refuse, state: Any, fed: Federation, before: Any, cohort: Cohort
    ) -> None:
        self._check_state(refuse, state)
        _check_kept(refuse, state, before)
        if fed is self._fed and cohort.log.cohort_size:
            self._check_obeyed(state, before, cohort)

    def _check_obeyed(self, state: Any, before: Any, cohort: Cohort) -> None:
        """Refuse options of the channel and of means if a round has passed them by."""
        channel, config = self._fed.channel, self._config
        up = {} if channel.uploads else _asked(config, acts_on="uploads")
        down = {} if channel.downloads else _asked(config, acts_on="downloads")
        mean = {} if self._fed.server_side.means else _asked(config, acts_on="means")
        if self._has_weighed(cohort):
            mean.pop("--weights", None)
        # Some methods do not communicate in every round.
        if self._is_hidden(state) and not cohort.in_flight.uploads:
            mean = {}
        if not (up or down or mean) or self._is_unchanged(state, before):
            return
        verb = "upload(rows" if up else "download(row" if down else "mean(rows"
        flags = ", ".join(f"{f} {value}" for f, value in (up or down or mean).items())
        deed = verb.partition("(")[0]
        raise UserError(
            f"{flags}: no effect, because method {config.method} has called no "
            f"fed.{deed}; its round must call fed.{verb}, cohort)"
        )

    def _has_weighed(self, cohort: Cohort) -> bool:
        """Tell whether any rank of a round has looked at clients' weights."""
        if self._config.weights == "method":
            return True
        here = cohort.in_flight.weighed or self._fed.members.weighed
        return self._fed.members.collectives.any_rank(here)

    def _is_unchanged(self, state: Any, before: Any) -> bool:
        """Tell whether a round has left the global row as it was."""
        if self._is_hidden(state):
            return False
        if self._version(before) != self._written:
            return False
        row, was = (self._method.global_row(one) for one in (state, before))
        return row is not None and was is not None and torch.equal(row, was)

    def _is_hidden(self, state: Any) -> bool:
        """Tell whether the global row cannot be compared with the one before."""
        in_place = any("in_place" in field.metadata for field in fields(state))
        return in_place or self._method.global_row(state) is None

    def _check_state(self, refuse: Refuse, state: Any) -> None:
        if not is_dataclass(state) or isinstance(state, type):
            refuse("a state, which is a dataclass of tensors")
        for field in fields(state):
            value = getattr(state, field.name)
            if not isinstance(value, Tensor):
                refuse(
                    "tensors in every field of a state, and this one's "
                    f"{field.name} is {_said(value)}"
                )

    def _check_personal(
        self,
        refuse: Refuse,
        rows: Any,
        fed: Federation,
        state: Any,
        clients: np.ndarray,
    ) -> None:
        self._check_tensor(
            refuse, rows, "a row for each of these clients", len(clients)
        )

    def _check_welcome(
        self, refuse: Refuse, rows: Any, fed: Federation, state: Any, cohort: Cohort
    ) -> None:
        what = "a row for each new client of this rank"
        self._check_tensor(refuse, rows, what, len(cohort.here))

    def _check_lead(self, refuse: Refuse, rows: Any, *given: Any) -> None:
        what = "a row for each new client of this rank"
        self._check_tensor(refuse, rows, what, len(given[-1]))

    def _check_global_row(self, refuse: Refuse, row: Any, state: Any) -> None:
        if row is not None:
            self._check_tensor(refuse, row, "None, or the global model's row")

    def _check_tensor(
        self, refuse: Refuse, found: Any, what: str, *clients: int
    ) -> None:
        """Refuse what is not a tensor of rows, or of one row without `clients`."""
        like = torch.empty(0, dtype=dtype_of(self._config), device=self._fed.device)
        shape = (*clients, self._fed.layout.num_columns)
        if not _is_alike(found, shape, like):
            refuse(f"{what}: {_kind(shape, like)}")

    def _check_pool(
        self, refuse: Refuse, ids: Any, fed: Federation, *others: Any
    ) -> None:
        if ids is None:
            return
        wanted = "None, or a numpy array of clients' ids, which ascend"
        if (
            not isinstance(ids, np.ndarray)
            or ids.ndim != 1
            or ids.dtype.kind not in "iu"
        ):
            refuse(wanted)
        if (np.diff(ids) <= 0).any() or np.setdiff1d(ids, range(len(fed.sizes))).size:
            refuse(wanted)

    def _check_finals(self, refuse: Refuse, found: Any, *given: Any) -> None:
        rows = self._named(refuse, found, self._method.FINALS, "rows")
        what = "a row for each of these clients"
        self._check_tensor(refuse, rows, what, len(given[-1]))

    def _check_figures(self, refuse: Refuse, found: Any, *given: Any) -> None:
        values = self._named(refuse, found, self._method.FIGURES, "numbers")
        count = len(given[-1])
        if not isinstance(values, Tensor) or values.shape != (count,):
            refuse(f"numbers for these clients: a tensor [{count}]")

    def _named(
        self, refuse: Refuse, found: Any, names: tuple[str, ...], what: str
    ) -> Any:
        """Return the second part of a name and a tensor."""
        is_pair = isinstance(found, tuple) and len(found) == 2
        if not is_pair or found[0] not in names:
            refuse(f"a name, one of {', '.join(names) or 'none'}, and {what}")
        return found[1]

    def _check_depths(self, refuse: Refuse, found: Any, *given: Any) -> None:
        if not isinstance(found, AtDepth):
            refuse("an AtDepth")


class _Watched(Cohort):
    """A cohort that notes in its round whether its weights were read."""

    def __getattribute__(self, name: str) -> Any:
        if name == "weights":
            self.in_flight.weighed = True
        return super().__getattribute__(name)


def _watched(argument: Any) -> Any:
    is_cohort = isinstance(argument, Cohort)
    return _Watched(**vars(argument)) if is_cohort else argument


def _asked(config: RunConfig, acts_on: str) -> dict[str, str]:
    """Return the flags that a run has for these, and their values."""
    given = {name: str(getattr(config, name)) for name in named(acts_on=acts_on)}
    return {flag_of(n): value for n, value in given.items() if value not in NO_PART}


def _check_kept(refuse: Refuse, state: Any, before: Any) -> None:
    """Refuse a state that a checkpoint could not hold in place of the one before."""
    names = [field.name for field in fields(before)]
    if [field.name for field in fields(state)] != names:
        refuse(f"a state with the fields {', '.join(names)}, as before the round")
    for field in fields(before):
        was, now = getattr(before, field.name), getattr(state, field.name)
        shape = was.shape
        if field.metadata.keys() & {"owned", "varies"}:
            # The number of clients is checked elsewhere.
            shape = now.shape[:1] + shape[1:]
        if "generated" in field.metadata:
            shape = now.shape
        if not _is_alike(now, shape, was):
            refuse(
                f"{field.name} as before the round, {_kind(shape, was)}, and not "
                f"{_said(now)}"
            )


def _is_alike(found: Any, shape: tuple[int, ...], like: Tensor) -> bool:
    """Tell whether this is a tensor of a shape, and of another one's type and device."""
    if not isinstance(found, Tensor) or found.shape != shape:
        return False
    return (found.dtype, found.device.type) == (like.dtype, like.device.type)


def _said(value: Any) -> str:
    """Say what a function has returned."""
    if isinstance(value, Tensor):
        return _kind(value.shape, value)
    if isinstance(value, np.ndarray):
        return f"a numpy array {list(value.shape)}"
    return "None" if value is None else type(value).__name__


def _kind(shape: tuple[int, ...], like: Tensor) -> str:
    return f"a tensor {list(shape)} of {like.dtype} on {like.device.type}"

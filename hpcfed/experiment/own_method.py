"""A method of the user's: what its functions draw follows from the seed."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from itertools import count
from typing import Any

from hpcfed import methods
from hpcfed.federation.federation import Federation
from hpcfed.methods import Method
from hpcfed.options import RunConfig
from hpcfed.runtime import draws, randomness

OURS = "hpcfed.methods."
"""Modules whose functions draw no numbers of their own, and have tests."""
STREAMS = ("finals", "figures", "depths")
"""Functions that yield what they find, one after the other."""


def load_method(config: RunConfig, fed: Federation) -> Method:
    """Return the run's method. If it is the user's, its functions are seeded by (seed,
    round, function), alike on all ranks.
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

    def function(self, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, seeded."""

        @wraps(function)
        def called(*arguments: Any) -> Any:
            with self._seeded(hook, arguments):
                return function(*arguments)

        return called

    def stream(self, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that yields, seeded for each item."""

        @wraps(function)
        def called(*arguments: Any) -> Iterator[Any]:
            with self._seeded(hook, arguments):
                found = function(*arguments)
            for number in count(1):
                with self._seeded(hook, arguments, number):
                    item = next(found, self)
                if item is self:
                    return
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

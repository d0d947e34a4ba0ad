"""Import heavy modules when methods run, not when their options are read.

The command line reads options of methods and must answer quickly, while torch alone
takes seconds to import. So the modules of this package run with an `import` that defers
heavy modules: what a file imports from them is a `Late` object at first. Its first use
imports the module and replaces the object by the real one. Authors write plain imports
at the top of their file, and type checkers notice nothing.
"""

import builtins
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

HEAVY = frozenset({"numpy", "scipy", "sklearn", "torch"})
ROOMS = frozenset({"clients", "federation", "kernels", "models", "runtime", "server"})
"""Packages of hpcfed whose modules may import heavy ones."""
LIGHT = frozenset({"hpcfed.server.guidance", "hpcfed.server.options"})
"""Modules in these that do not. They have types of options, which must be real."""

_executing: set[str] = set()
"""Modules of this package that are being imported."""


class Late:
    """A module, or an object in one, that is imported when it is first used."""

    def __init__(self, home: str, module: str, *names: str) -> None:
        self._home = home
        self._module = module
        self._names = names

    def __repr__(self) -> str:
        return f"<{'.'.join((self._module, *self._names))}, imported when it is used>"

    def _real(self) -> Any:
        """Import it, and replace this object by it in all modules of this package."""
        found: Any = importlib.import_module(self._module)
        for name in self._names:
            if not hasattr(found, name):
                importlib.import_module(f"{found.__name__}.{name}")
            found = getattr(found, name)
        for name, module in list(sys.modules.items()):
            if name.startswith(__package__):
                for own, value in list(vars(module).items()):
                    if value is self:
                        setattr(module, own, found)
        return found

    def __getattr__(self, name: str) -> Any:
        # Generic types such as tuple[str, Tensor] probe for dunder attributes.
        if name.startswith("__"):
            raise AttributeError(name)
        # `from module import name`, and annotations, whose value is never used.
        if self._home in _executing:
            return Late(self._home, self._module, *self._names, name)
        return getattr(self._real(), name)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._real()(*arguments, **keywords)

    def __getitem__(self, key: Any) -> Any:
        # An annotation such as Federation[Options].
        if isinstance(key, type | Late):
            return self
        return self._real()[key]

    def __or__(self, other: Any) -> Any:
        return self  # an annotation such as Tensor | None

    __ror__ = __or__

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._real())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (self._real(),)


def _can_wait(module: str, names: Sequence[str]) -> bool:
    """Tell whether to import these names of a module later."""
    if module in LIGHT:
        return False
    top, _, rest = module.partition(".")
    if not (top in HEAVY or (top == "hpcfed" and rest.partition(".")[0] in ROOMS)):
        return False
    loaded = sys.modules.get(module)
    # A name that a loaded package lacks is a submodule that is not loaded yet.
    return loaded is None or not all(hasattr(loaded, name) for name in names)


class _Loader(SourceFileLoader):
    """Execute a module of this package with an `import` that defers heavy modules."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        # The import statement calls `__import__` of the module's `__builtins__`.
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": _importer(name)}
        _executing.add(name)
        try:
            super().exec_module(module)
        finally:
            _executing.discard(name)


def _importer(home: str) -> Callable[..., Any]:
    def late_import(
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        if home in _executing and level == 0 and _can_wait(name, fromlist or ()):
            # `import torch.nn.functional as F` gets torch, then its attributes.
            return Late(home, name if fromlist else name.partition(".")[0])
        return __import__(name, globals, locals, fromlist or (), level)

    return late_import


class _Finder(MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname.rpartition(".")[0] != __package__:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


# From here on, all modules of this package are imported this way.
sys.meta_path.insert(0, _Finder())

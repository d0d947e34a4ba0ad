"""Functions of a user's method with misspelt names: nobody would ever call them."""

from collections.abc import Collection
from types import CodeType, FunctionType, ModuleType

from hpcfed.errors import UserError, did_you_mean


def check_spelling(name: str, module: ModuleType, hooks: Collection[str]) -> None:
    """Refuse a function that nothing uses, and whose name is nearly one of `hooks`: the
    parent's would run in its place.
    """
    own = {}
    for word, thing in vars(module).items():
        if isinstance(thing, FunctionType) and thing.__module__ == module.__name__:
            own[word] = thing
    used = set()
    for function in own.values():
        used |= words_in(function.__code__)
    missing = [hook for hook in hooks if hook not in own]
    for word in sorted(own.keys() - used - set(hooks)):
        guess = did_you_mean(word, missing)
        if guess and not word.startswith("_"):
            raise UserError(f"method {name}: nothing calls its function {word}{guess}")


def words_in(code: CodeType) -> set[str]:
    """Return the global names and attributes in a function, and in those within it."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= words_in(constant)
    return found

"""Modules that are not what their files say: with a change, or with probes that tell
which statements were reached.
"""

import ast
import gc
from collections.abc import Callable, Iterable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType

from benchmarks.mutation.mutants import Mutant, code_of

PROBE = "__reached__"
Functions = dict[tuple[str, str, int], list[FunctionType]]
"""All functions of modules by file, name and first line."""


def plant(codes: dict[Path, Callable[[str], CodeType]]) -> None:
    """Have some files imported with other code than they have; none of these modules may
    have been imported yet. `codes` has what makes the code, given the file's path.
    """
    by_path = {str(path): make for path, make in codes.items()}
    usual = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
        make = by_path.get(loader.path)
        return make(loader.path) if make else usual(loader, fullname)

    # All loaders of files ask here; a finder of our own would come too late where a
    # package puts one of its own before it.
    SourceFileLoader.get_code = get_code  # type: ignore[method-assign,assignment]


def with_change(mutant: Mutant) -> Callable[[str], CodeType]:
    """Return what makes a changed module's code."""
    return lambda path: compile(mutant.text, path, "exec", dont_inherit=True)


def with_probes(text: bytes, number: int) -> Callable[[str], CodeType]:
    """Return what makes the code of a module that calls the probe before every
    statement: with its line, plus `number`, which tells the module.
    """

    def make(path: str) -> CodeType:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            for name in ("body", "orelse", "finalbody"):
                body = getattr(node, name, None)
                if isinstance(body, list):
                    setattr(node, name, _probed(body, number))
        code = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
        assert isinstance(code, CodeType)
        return code

    return make


def _probed(body: list[ast.stmt], number: int) -> list[ast.stmt]:
    probed: list[ast.stmt] = []
    for each in body:
        is_text = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
        if not is_text:
            line = ast.Constant(number + each.lineno)
            call = ast.Call(ast.Name(PROBE, ast.Load()), [line], [])
            probed.append(ast.copy_location(ast.Expr(call), each))
        probed.append(each)
    return probed


def functions_of(root: Path, modules: Iterable[str]) -> Functions:
    """Find the functions of imported modules, wherever they are referred to."""
    files = {str(root / module) for module in modules}
    found: Functions = {}
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename in files:
            code = each.__code__
            key = (code.co_filename, code.co_qualname, code.co_firstlineno)
            found.setdefault(key, []).append(each)
    return found


def change(mutant: Mutant, root: Path, functions: Functions) -> bool:
    """Change a function of this process; return False if it cannot be done in place."""
    if mutant.point.outer is None:
        return False
    path = str(root / mutant.module)
    code = code_of(mutant, path)
    for function in functions[(path, *mutant.point.outer)]:
        if function.__code__.co_freevars != code.co_freevars:
            return False
        function.__code__ = code
    return True

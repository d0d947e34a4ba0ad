"""Small changes to a module: what could be changed, and the text of the changed module."""

import ast
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType

COMPARED = {
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<", ">=")),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">", "<=")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: (r"is\s+not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: (r"not\s+in", ("in",)),
}
COMPUTED = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
PAIRS = (
    ("min", "max"), ("any", "all"), ("floor", "ceil"), ("zeros", "ones"), ("new_zeros", "new_ones"),
    ("zeros_like", "ones_like"), ("minimum", "maximum"), ("logical_and", "logical_or"),
)  # fmt: skip
CALLED = dict(PAIRS) | {b: a for a, b in PAIRS}
MESSAGES = {"print", "say", "_say", "warn", "one_line", "UserError", "TypeVar"}
"""Calls whose words are for users."""
GUARDS = {"strict"}
"""Keywords that only check what must hold anyway, as `zip(a, b, strict=True)`."""


@dataclass(frozen=True)
class Point:
    """A change that could be made to a module."""

    start: int
    end: int
    """Bytes of the text that are replaced."""
    by: bytes
    lines: tuple[int, ...]
    """Lines of statements: who reaches one of them meets the change. It is the innermost
    statement around it; of what acts at import, what may use it.
    """
    function: str
    """Name of the innermost function or class around it, as in a traceback."""
    outer: tuple[str, int] | None
    """Name and first line of the outermost function around it; None: the change acts
    when the module is imported.
    """


@dataclass(frozen=True)
class Mutant:
    """A module with one change."""

    module: str
    line: int
    point: Point
    old: str
    new: str
    text: bytes

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What stays when line numbers move."""
        return self.module, self.point.function, self.old, self.new


class _Finder:
    """Walks over a module, and keeps the points that it passes."""

    def __init__(self, text: bytes, tree: ast.Module) -> None:
        self._text = text
        self._uses = _uses(tree)
        self._around: tuple[int, ...] = ()
        """Lines of the class around."""
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.points: list[Point] = []
        self._lines: tuple[int, ...] = ()
        self._names: list[str] = []
        self._outer: tuple[str, int] | None = None

    def walk(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self._lines = self._meeting(node)
        self._add_points(node)
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._walk_function(node)
            case ast.ClassDef():
                outer, self._around = self._around, _lines(node)
                self._names.append(node.name)
                self._walk_all(node.body)
                self._names.pop()
                self._around = outer
            case ast.AnnAssign():
                self._walk_all([node.value] if node.value else [])
            case ast.Raise() | ast.Assert() | ast.JoinedStr():
                pass
            case ast.Expr(value=ast.Constant()):  # a docstring
                pass
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case ast.Call() if _called(node) in MESSAGES:
                pass
            case ast.keyword(arg=name) if name in GUARDS:
                pass
            case _:
                within = self._lines
                for child in ast.iter_child_nodes(node):
                    self._lines = within
                    self.walk(child)

    def _meeting(self, node: ast.stmt) -> tuple[int, ...]:
        """Return the lines whose statements meet a change of this statement."""
        if self._outer is not None:
            return (node.lineno,)
        if isinstance(node, ast.FunctionDef) or self._around:  # defaults, fields
            return self._around or _lines(node)
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        return tuple(sorted(set().union(*(self._uses.get(n, set()) for n in names))))

    def _walk_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.walk(node)

    def _walk_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Default values act where the function is defined, its body where it is called."""
        defaults = node.args.defaults + [d for d in node.args.kw_defaults if d]
        self._walk_all(defaults)
        before = self._outer
        self._names.append(node.name)
        if before is None:
            # As in the names of code objects: classes around it count.
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            self._outer = ".".join(self._names), first
        self._walk_all(node.body)
        self._names.pop()
        self._outer = before

    def _at(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None and node.end_col_offset is not None
        begin = self._starts[node.lineno - 1] + node.col_offset
        return begin, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _add(self, start: int, end: int, by: bytes | str) -> None:
        by = by.encode() if isinstance(by, str) else by
        name = ".".join(self._names)
        self.points.append(Point(start, end, by, self._lines, name, self._outer))

    def _swap(self, left: ast.expr, right: ast.expr, word: str, by: str) -> None:
        """Replace the operator between two operands."""
        start, end = self._at(left)[1], self._at(right)[0]
        pattern = rf"\b{word}\b" if word[0].isalpha() else re.escape(word)
        # A comment between them may have the operator's sign, too.
        between = re.sub(
            rb"#.*", lambda m: b" " * len(m[0]), self._text[start:end]
        ).decode("latin-1")
        found = re.search(pattern, between)
        if found:
            self._add(start + found.start(), start + found.end(), by)

    def _add_points(self, node: ast.AST) -> None:
        match node:
            case ast.Compare():
                operands = [node.left, *node.comparators]
                for left, operator, right in zip(
                    operands, node.ops, operands[1:], strict=False
                ):
                    word, others = COMPARED[type(operator)]
                    for other in others:
                        self._swap(left, right, word, other)
            case ast.BinOp() if type(node.op) in COMPUTED:
                if not any(map(_is_text, (node.left, node.right))):
                    self._swap(node.left, node.right, *COMPUTED[type(node.op)])
            case ast.AugAssign() if type(node.op) in COMPUTED:
                self._swap(node.target, node.value, *COMPUTED[type(node.op)])
            case ast.BoolOp():
                words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for left, right in zip(node.values, node.values[1:], strict=False):
                    self._swap(left, right, *words)
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                start, _ = self._at(node)
                sign = re.match(rb"not\s+|-\s*", self._text[start:])
                assert sign is not None
                self._add(start, start + sign.end(), b"")
            case ast.Constant():
                self._add_constants(node)
            case ast.Slice():
                self._add_slices(node)
            case ast.Call() if _called(node) in CALLED:
                name = _called(node)
                end = self._at(node.func)[1]
                self._add(end - len(name), end, CALLED[name])
            case ast.Return(value=ast.Tuple(elts=[one, other, *_])):
                (start, middle), (then, end) = self._at(one), self._at(other)
                first, second = self._text[start:middle], self._text[then:end]
                self._add(start, end, second + self._text[middle:then] + first)
            case ast.Continue():
                self._add(*self._at(node), "break")
            case ast.Break():
                self._add(*self._at(node), "continue")
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            if not isinstance(node.test, ast.Constant | ast.Compare):
                self._negate(node.test)
        elif isinstance(node, ast.comprehension):
            for test in node.ifs:
                if not isinstance(test, ast.Compare):
                    self._negate(test)
        if _can_be_removed(node):
            start, end = self._at(node)
            lines = self._text[start:end].count(b"\n")
            self._add(start, end, b"pass" + b"\n" * lines)

    def _negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return  # its `not` is removed already
        start, end = self._at(test)
        self._add(start, end, b"not (" + self._text[start:end] + b")")

    def _add_constants(self, node: ast.Constant) -> None:
        value = node.value
        others: list[object] = []
        if isinstance(value, bool):
            others = [not value]
        elif isinstance(value, int | float):
            others = [value + 1, value - 1]
        for other in others:
            self._add(*self._at(node), repr(other))

    def _add_slices(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is None or isinstance(bound, ast.Constant):
                continue
            start, end = self._at(bound)
            text = self._text[start:end]
            if not isinstance(
                bound, ast.Name | ast.Attribute | ast.Call | ast.Subscript
            ):
                text = b"(" + text + b")"
            self._add(start, end, text + b" + 1")
            self._add(start, end, text + b" - 1")


def _lines(node: ast.stmt) -> tuple[int, ...]:
    """Return the lines of all statements within a function or class."""
    within = (each.lineno for each in ast.walk(node) if isinstance(each, ast.stmt))
    return tuple(sorted(set(within) - {node.lineno}))


def _uses(tree: ast.Module) -> dict[str, set[int]]:
    """Return for every name the lines of the statements of functions that use it."""
    found: dict[str, set[int]] = {}

    def look(node: ast.AST, line: int | None) -> None:
        if isinstance(node, ast.Name) and line is not None:
            found.setdefault(node.id, set()).add(line)
        in_function = line is not None or isinstance(node, ast.FunctionDef)
        for child in ast.iter_child_nodes(node):
            if in_function and isinstance(child, ast.stmt):
                look(child, child.lineno)
            else:
                look(child, line)

    look(tree, None)
    return found


def _called(node: ast.Call) -> str:
    """Return the last name of what is called, as `sort` of `x.sort()`."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _is_text(node: ast.expr) -> bool:
    """Tell whether it is a text for sure; texts that are put together have no minus."""
    is_constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_constant or isinstance(node, ast.JoinedStr | ast.List | ast.ListComp)


def _can_be_removed(node: ast.AST) -> bool:
    """Tell whether a module is still one without this statement."""
    match node:
        case ast.Expr(value=ast.Call() as call):
            return _called(call) not in MESSAGES
        case ast.AugAssign() | ast.Raise(exc=ast.expr()):
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
        case _:
            return False


def points_of(text: bytes) -> list[Point]:
    """Return all changes that could be made to a module's text, in its order."""
    tree = ast.parse(text)
    finder = _Finder(text, tree)
    finder.walk(tree)
    return sorted(finder.points, key=lambda point: (point.start, point.end, point.by))


def mutant_of(module: str, text: bytes, point: Point) -> Mutant:
    """Make the change. Every line keeps its number."""
    changed = text[: point.start] + point.by + text[point.end :]
    line = text[: point.start].count(b"\n") + 1
    old = text[point.start : point.end]
    if b"\n" in old or b"\n" in point.by:
        shown = _on_one_line(old), _on_one_line(point.by)
    else:
        lines = text.splitlines()[line - 1], changed.splitlines()[line - 1]
        shown = lines[0].decode().strip(), lines[1].decode().strip()
    return Mutant(module, line, point, *shown, changed)


def _on_one_line(text: bytes) -> str:
    return " ".join(text.decode().split())


def is_another_program(text: bytes, mutant: Mutant) -> bool:
    """Tell whether a change gives a module that Python reads, and reads differently."""
    try:
        return ast.dump(ast.parse(mutant.text)) != ast.dump(ast.parse(text))
    except SyntaxError:
        return False


def drawn(
    modules: dict[str, bytes], number: int, seed: int
) -> tuple[list[Mutant], dict[str, int]]:
    """Draw mutants by a seed, equally many of each module as far as it has them. Return
    also the number of all that could have been drawn, by module.
    """
    queues: list[Iterator[Mutant]] = []
    counts = {}
    for module, text in modules.items():
        points = points_of(text)
        counts[module] = len(points)
        random.Random(f"{seed} {module}").shuffle(points)
        queues.append(_programs(module, text, points))
    found: list[Mutant] = []
    while queues and len(found) < number:
        for queue in list(queues):
            mutant = next(queue, None)
            if mutant is None:
                queues.remove(queue)
            elif len(found) < number:
                found.append(mutant)
    places = {module: place for place, module in enumerate(modules)}
    return sorted(found, key=lambda each: (places[each.module], each.line)), counts


def _programs(module: str, text: bytes, points: list[Point]) -> Iterator[Mutant]:
    for point in points:
        mutant = mutant_of(module, text, point)
        if is_another_program(text, mutant):
            yield mutant


def code_of(mutant: Mutant, path: str) -> CodeType:
    """Return the code of the outermost function around the change."""
    assert mutant.point.outer is not None
    for code in _codes(compile(mutant.text, path, "exec", dont_inherit=True)):
        if (code.co_qualname, code.co_firstlineno) == mutant.point.outer:
            return code
    raise LookupError(mutant.point.outer)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)

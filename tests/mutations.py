"""Defines mutation operators: small changes of Python and Lua code that a test should detect.

A mutant is the source with one span of text replaced, so that all other lines keep their numbers.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.MatMult: ast.Mult,
}


@dataclass(frozen=True)
class Mutant:
    """`source` with the text at `start` … `end` (offsets in characters) replaced by `after`; `line` counts from 1."""

    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        told = f"{self.line}: {_short(self.before)} → {_short(self.after)}"
        return told if len(self.before) > 20 else f"{told}   in {_short(self.source.splitlines()[self.line - 1])}"


def mutants(source: str) -> list[Mutant]:
    """Every mutant of a Python module that compiles, in the order of its lines, none twice."""
    lines = _line_starts(source)
    found: dict[str, Mutant] = {}
    for node, after in _python(ast.parse(source)):
        start, end = _offset(lines, source, node), _offset(lines, source, node, at_end=True)
        _add(found, source, node.lineno, start, end, after)
    return sorted(found.values(), key=lambda mutant: mutant.line)


def lua_mutants(source: str) -> list[Mutant]:
    """Every mutant of a Lua script, in the order of its lines, none twice. One that does not compile is noticed."""
    found: dict[str, Mutant] = {}
    for start, end, after in _lua(source):
        made = source[:start] + after + source[end:]
        if made != source:
            found.setdefault(made, Mutant(source.count("\n", 0, start) + 1, source[start:end], after, made))
    return sorted(found.values(), key=lambda mutant: mutant.line)


def _add(found: dict[str, Mutant], source: str, line: int, start: int, end: int, after: str) -> None:
    made = source[:start] + after + source[end:]
    try:
        compile(made, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return
    if made != source:
        found.setdefault(made, Mutant(line, source[start:end], after, made))


# -- Python --------------------------------------------------------------------------------------------------------


def _python(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Nodes and their replacements."""
    for node, returns in _mutable(tree, None):
        match node:
            case ast.Compare(ops=[operator]):
                for other in COMPARISONS[type(operator)]:
                    yield node, _changed(node, ops=[other()])
            case ast.BoolOp(op=operator, values=values):
                yield node, _changed(node, op=ast.Or() if isinstance(operator, ast.And) else ast.And())
                for i in range(len(values)):
                    left = values[:i] + values[i + 1 :]
                    yield node, f"({ast.unparse(left[0])})" if len(left) == 1 else _changed(node, values=left)
            case ast.IfExp(body=body, orelse=orelse):
                yield node, f"({ast.unparse(body)})"
                yield node, f"({ast.unparse(orelse)})"
            case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
                yield node, f"({ast.unparse(operand)})"
            case ast.BinOp(op=operator):
                yield node, _changed(node, op=ARITHMETIC[type(operator)]())
            case ast.Constant(value=bool() as value):
                yield node, str(not value)
            case ast.Constant(value=int() as value):
                yield from ((node, f"({other})") for other in (value + 1, value - 1))
            case ast.Constant(value=float() as value):
                yield from ((node, f"({other})") for other in ((value * 1.1, value * 0.9) if value else (1.0,)))
            case ast.Call(args=arguments) if not any(isinstance(one, ast.Starred) for one in arguments):
                for i in range(len(arguments) - 1):
                    if ast.dump(arguments[i]) != ast.dump(arguments[i + 1]):
                        swapped = [*arguments[:i], arguments[i + 1], arguments[i], *arguments[i + 2 :]]
                        yield node, _changed(node, args=swapped)
            case ast.If(test=test) | ast.While(test=test):
                if not isinstance(test, ast.Compare | ast.UnaryOp):  # which are negated by themselves
                    yield test, f"(not ({ast.unparse(test)}))"
            case ast.comprehension(ifs=[test]):
                yield test, "True"
            case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
                yield node, "return None"
                if returns == "bool" and ast.unparse(value) != "True":
                    yield node, "return True"
            case ast.AugAssign(op=operator):
                yield node, _changed(node, op=ARITHMETIC[type(operator)]())
                yield node, "pass"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield node, "pass"
            case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.Delete() | ast.Continue() | ast.Break():
                yield node, "pass"


def _mutable(node: ast.AST, returns: str | None) -> Iterator[tuple[ast.AST, str | None]]:
    """All nodes but annotations, decorators and imports, each with what the function around it says it returns."""
    yield node, returns
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        returns = ast.unparse(node.returns) if node.returns else None
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Import | ast.ImportFrom | ast.JoinedStr):
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            yield from _mutable(child, returns)


def _changed(node: ast.expr | ast.stmt, **fields: object) -> str:
    made = copy.copy(node)
    for name, value in fields.items():
        setattr(made, name, value)
    return f"({ast.unparse(made)})" if isinstance(node, ast.expr) else ast.unparse(made)


# -- Lua -----------------------------------------------------------------------------------------------------------

_LUA = (
    (r"==", ("~=",)),
    (r"~=", ("==",)),
    (r"<=", ("<", ">")),
    (r">=", (">", "<")),
    (r"(?<![<>=~])<(?!=)", ("<=", ">=")),
    (r"(?<![<>=~])>(?!=)", (">=", "<=")),
    (r"\band\b", ("or",)),
    (r"\bor\b", ("and",)),
    (r"\bnot ", ("",)),
    (r" \+ ", (" - ",)),
    (r"(?<=\S) - ", (" + ",)),
    (r" \* ", (" / ",)),
    (r" / ", (" * ",)),
    (r"\bmath\.min\b", ("math.max",)),
    (r"\bmath\.max\b", ("math.min",)),
    (r"\btrue\b", ("false",)),
    (r"\breturn false\b", ("",)),
    (r"\bbreak\b", ("",)),
)
_STATEMENT = re.compile(r"^ *(?:redis\.call|[a-z_]+)\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\) *$", re.MULTILINE)
_NUMBER = re.compile(r"(?<![\w.\[\]'])\d+(?![\w.'\]])")


def _lua(text: str) -> Iterator[tuple[int, int, str]]:
    """Spans of Lua and their replacements: never within strings and comments."""
    code = re.sub(r"--[^\n]*|'[^'\n]*'", lambda found: "\0" * len(found[0]), text)
    for pattern, others in _LUA:
        for found in re.finditer(pattern, code):
            yield from ((found.start(), found.end(), other) for other in others)
    for found in _NUMBER.finditer(code):
        value = int(found[0])
        near = (value + 1, value - 1) if value < 100 else (2 * value, value // 2)  # milliseconds: one is no difference
        yield from ((found.start(), found.end(), str(other)) for other in near if other >= 0)
    for found in _STATEMENT.finditer(code):
        yield found.start(), found.end(), ""


# -- places --------------------------------------------------------------------------------------------------------


def _line_starts(source: str) -> list[int]:
    return [0, *(found.end() for found in re.finditer("\n", source))]


def _offset(lines: list[int], source: str, node: ast.expr | ast.stmt, *, at_end: bool = False) -> int:
    """In characters; ast counts columns in bytes of UTF-8."""
    line, column = (node.end_lineno, node.end_col_offset) if at_end else (node.lineno, node.col_offset)
    assert line is not None and column is not None
    text = source[lines[line - 1] :].split("\n", 1)[0]
    return lines[line - 1] + len(text.encode()[:column].decode())


def _short(text: str, most: int = 90) -> str:
    flat = " ".join(text.split())
    return (flat if len(flat) <= most else f"{flat[: most - 1]}…") or "∅"

"""Renders the tables of README.md and docs/, which are declared as columns of formats over rows of a result.

A column is a header and a cell, both formats of `str.format`: of the first result, and of the row. A format may scale
its value (`{p99_s:1000*.0f} ms`); a cell one of whose values is missing is "–".
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Result = dict[str, Any]
Columns = Sequence[tuple[str, str]]
NONE = "–"


class _Missing(LookupError):
    """A cell's value is not there."""


class _Cells(string.Formatter):
    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            value, used = super().get_field(field_name, args, kwargs)
        except (KeyError, IndexError, TypeError, AttributeError):
            raise _Missing from None
        if value is None:
            raise _Missing
        return value, used

    def format_field(self, value: Any, format_spec: str) -> str:
        factor, scaled, form = format_spec.rpartition("*")
        return format(value * float(factor) if scaled else value, form)


_CELLS = _Cells()


def cell(form: str, row: Mapping[str, Any]) -> str:
    """The cell of a row, or "–"."""
    try:
        return _CELLS.vformat(form, (), row)
    except _Missing:
        return NONE


class Table(NamedTuple):
    """A table of one or several results, named by their files under lab/bench/.

    `columns` may depend on the results, `rows` are mappings; `note` is a format of the first result, or made of all.
    Those of a benchmark are printed when it ends, of its own result alone: all others are empty then.
    """

    files: tuple[str, ...]
    columns: Columns | Callable[..., Columns]
    rows: Callable[..., Iterable[Mapping[str, Any]]]
    note: str | Callable[..., str] = ""

    def cells(self, *results: Result) -> tuple[list[str], list[list[str]], str]:
        """Return the header, the rows and the note."""
        columns = self.columns(*results) if callable(self.columns) else self.columns
        header = [_CELLS.vformat(title, (), results[0]) for title, _ in columns]
        rows = [[cell(form, row) for _, form in columns] for row in self.rows(*results)]
        return header, rows, self.note(*results) if callable(self.note) else _CELLS.vformat(self.note, (), results[0])

    def lines(self, *results: Result) -> list[str]:
        """Return the lines of the table in a page, and its note."""
        header, rows, note = self.cells(*results)
        table = [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows)]
        return [*table, "", note] if note else table

    def show(self, result: Result) -> None:
        """Print the table of the first of its results alone, without columns that have no value in it."""
        from rich.console import Console
        from rich.table import Table as Rendered

        header, rows, note = self.cells(result, *({} for _ in self.files[1:]))
        shown = [number for number in range(len(header)) if any(row[number] not in (NONE, "") for row in rows)]
        rendered = Rendered()
        for number in shown:
            rendered.add_column(_plain(header[number]), justify="right" if number else "left", overflow="fold")
        for row in rows:
            rendered.add_row(*(_plain(row[number]) for number in shown))
        Console(markup=False).print(rendered)
        print(_plain(note), end="\n" * bool(note))


def _plain(text: str) -> str:
    """A text of a page as a terminal shows it."""
    return text.replace("`", "").replace("**", "")


class Text(NamedTuple):
    """Lines of a result that are no table."""

    files: tuple[str, ...]
    lines: Callable[..., list[str]]

    def show(self, result: Result) -> None:
        """Print the lines."""
        print(*map(_plain, self.lines(result)), sep="\n")


def interval(key: str, form: str, scale: str = "") -> str:
    """The format of a value and its interval, which are a list."""
    return "{%s[0]:%s} ({%s[1]:%s} to {%s[2]:%s})" % (*(key, scale + form) * 3,)  # noqa: UP031


def estimate(key: str, form: str) -> str:
    """The format of a value and its interval, which are named."""
    return "{%s[value]:%s} ({%s[low]:%s} to {%s[high]:%s})" % (*(key, form) * 3,)  # noqa: UP031

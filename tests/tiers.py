"""Selects the cases of parametrized tests that run in `make test`; the others are marked `long`.

@pytest.mark.quick("plain", "distilled")    these cases, by id or by position
@pytest.mark.quick                          few cases that together have every value of each parameter
@pytest.mark.quick(strength=2)              every pair of values of two parameters
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import pytest


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("quick"):
            cases[item.nodeid.partition("[")[0]].append(item)
    named = ["::" in argument for argument in config.args]
    if all(named) and config.option.markexpr == "not long":
        config.option.markexpr = ""  # who names a test wants it run
    whole = not any(named)
    for name, functions in cases.items():
        mark = functions[0].get_closest_marker("quick")
        assert mark is not None
        if mark.args:
            ids = [function.callspec.id for function in functions]
            unknown = [case for case in mark.args if case not in ids and case not in range(len(ids))]
            if unknown and whole:
                raise pytest.UsageError(f"{name} has no case {unknown[0]!r}; there are {ids}")
            quick = {case if isinstance(case, int) else ids.index(case) for case in mark.args if case not in unknown}
        else:
            values = [{key: id(value) for key, value in function.callspec.params.items()} for function in functions]
            quick = covering(values, mark.kwargs.get("strength", 1))
        for position, function in enumerate(functions):
            if position not in quick:
                function.add_marker("long")


def covering(cases: Sequence[Mapping[str, int]], strength: int) -> set[int]:
    """Positions of few cases that have every combination of values of `strength` parameters that any case has."""
    groups = [set(itertools.combinations(sorted(case.items()), min(strength, len(case)))) for case in cases]
    missing, chosen = set().union(*groups), set()
    while missing:
        best = max(range(len(groups)), key=lambda position: (len(groups[position] & missing), -position))
        chosen.add(best)
        missing -= groups[best]
    return chosen

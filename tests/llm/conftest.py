"""Provides the compiler of the small model's grammars."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llm.grammars.constrain import GrammarCompiler
from tests.llm import stage


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    pytest.importorskip("llguidance")
    model = stage.small()
    compiler = GrammarCompiler(model.tokenizer, model.vocabulary, sorted(model.ends))
    yield compiler
    compiler.close()

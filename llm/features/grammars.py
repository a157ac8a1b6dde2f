"""Grammars of answers: JSON schemas, and calls of tools."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from contract.errors import Invalid
from contract.tools import TOOLS
from core.batching.request import Request
from llm.features.feature import RunnerParts, SequenceFeature
from llm.grammars.constrain import GrammarCompiler
from llm.grammars.mask_turns import MaskTurns
from llm.parameters import TextParameters
from llm.step_planner import DECODE


class GrammarFeature(SequenceFeature):
    """The grammar that holds an answer; its masks are computed beside forwards, and late ones wait."""

    name = "grammar"

    def __init__(self, parts: RunnerParts) -> None:
        super().__init__(parts)
        model = parts.model
        self._compiler = GrammarCompiler(model.tokenizer, model.vocabulary, sorted(model.ends))
        self._turns = MaskTurns()

    def is_requested(self, parameters: TextParameters) -> bool:
        return parameters.json_schema is not None or parameters.tool_grammar is not None

    def check(self, request: Request) -> None:
        parameters: TextParameters = request.parameters
        if parameters.json_schema is not None:
            request.checked = self._compiler.compile(parameters.json_schema, request.tenant)
        if parameters.tool_grammar is not None:
            try:
                request.checked = self._compiler.compile_lark(parameters.tool_grammar, request.tenant)
            except Invalid as error:
                raise error.of(TOOLS) from error

    def options(self, request: Request) -> Mapping[str, Any]:
        return {"matcher": request.checked.matcher(request.tenant)}

    def deferred(self, requests: Sequence[Request], forward_s: float) -> Collection[str]:
        """Return answers whose masks would delay the others."""
        matchers = [request.work.matcher if request.phase == DECODE else None for request in requests]
        answers = [(request.tenant, matcher) for request, matcher in zip(requests, matchers, strict=True)]
        return [requests[i].id for i in self._turns.waiting(answers, forward_s)]

    def close(self) -> None:
        self._compiler.close()

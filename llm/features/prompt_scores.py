"""Log probabilities of prompts' tokens."""

from __future__ import annotations

from llm.features.feature import SequenceFeature
from llm.parameters import TextParameters
from llm.sequence import SequenceState
from llm.step import StepResult


class PromptScoreFeature(SequenceFeature):
    """The log probabilities of a prompt's tokens, of so many in a forward that its logits take bounded memory."""

    name = "prompt scores"

    def is_requested(self, parameters: TextParameters) -> bool:
        return parameters.prompt_logprobs

    def rows(self, sequence: SequenceState, rows: int) -> int:
        return min(rows, self.parts.model_runner.score_rows) if sequence.scored else rows

    def take(self, sequence: SequenceState, result: StepResult) -> None:
        sequence.prompt_logprobs += result.scores

"""Log probabilities of prompts' tokens."""

from __future__ import annotations

from torch import Tensor

from llm.features.feature import SequenceFeature
from llm.parameters import TextParameters
from llm.sampling.choose import prompt_logprobs
from llm.sequence import SequenceState
from llm.step import Share, StepResult


class ScoreReader:
    """Computes the log probabilities of a prompt's tokens from the logits before them."""

    reads_states = False

    def places(self, share: Share) -> range:
        return share.among(share.sequence.scored)

    def fill(self, share: Share, result: StepResult, x: Tensor) -> None:
        sequence, places = share.sequence, self.places(share)
        tokens = sequence.tokens[places.start + 1 : places.stop + 1]
        result.scores = prompt_logprobs(x, tokens, sequence.parameters.logprobs or 0)


class PromptScoreFeature(SequenceFeature):
    """The log probabilities of a prompt's tokens, of so many in a forward that its logits take bounded memory."""

    name = "prompt scores"
    reader = ScoreReader()

    def is_requested(self, parameters: TextParameters) -> bool:
        return parameters.prompt_logprobs

    def rows(self, sequence: SequenceState, rows: int) -> int:
        return min(rows, self.parts.model_runner.score_rows) if sequence.scored else rows

    def take(self, sequence: SequenceState, result: StepResult) -> None:
        sequence.prompt_logprobs += result.scores

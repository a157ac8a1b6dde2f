"""The text panel of a worker: a job's messages or prompts become token ids, and answers become the job's result.

Knows jobs' parameters, tokenizers and what is told while text is written; knows nothing of queues or HTTP. Light to
import: it is there before torch is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from core.batching.request import Outcome
from core.batching.runner import Refused
from core.jobs.cards import ModelCard
from llm.pages import PAGE
from llm.parameters import MAX_BIASED, MAX_LOGPROBS, MAX_SEED, MAX_STOPS, Logprob, TextParameters
from workers.written import Written

if TYPE_CHECKING:
    from llm.parameters import Text
    from llm.runner import TextRunner
    from workers.shelf import Shelf

MAX_CHOICES = 16  # of one job, over all its prompts
MAX_CHARACTERS = 1_000_000  # of all that a job brings; what the model has room for is counted in tokens
_USUAL = 64  # tokens of an answer whose capacity is told
_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
_PASSED = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs",
    "json_schema",
)  # fmt: skip


class TextPanel:
    """Texts: a job asks for n answers to each of its prompts, with seeds that count up."""

    def __init__(self, runner: TextRunner) -> None:
        self._runner = runner
        self.name = runner.model.name
        # Not those alone that transformers calls special: a Llama's headers of turns are control tokens too.
        added = runner.model.tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        self._controls = [token.content for token in added if token.special]

    def card(self) -> ModelCard:
        runner = self._runner
        rows = [count for count in _WIDTHS if count <= runner.limit("text")]
        token_s = min(runner.cost("text", count) / count for count in rows)
        return ModelCard(
            name=self.name,
            modality=runner.modality,
            precision=runner.model.precision,
            kernels=runner.execution.kernels,
            kernels_reason=runner.execution.kernels_reason,
            device=str(runner.model.device),
            native=0,
            sizes=[],
            schedulers=[],
            default_scheduler="",
            limits={
                "context": runner.context,
                "max_prompt_characters": MAX_CHARACTERS,
                "max_choices": MAX_CHOICES,
                "max_stops": MAX_STOPS,
                "max_logprobs": MAX_LOGPROBS,
                "max_logit_bias": MAX_BIASED,
                "max_seed": MAX_SEED,
                "cache_tokens": runner.pages.capacity * PAGE,
            },
            costs={"token_s": token_s, "solo_token_s": runner.cost("text", 1)},
            capacity_per_s=1 / token_s / _USUAL,
        )

    def requests(self, parameters: Mapping[str, Any]) -> list[TextParameters]:
        """The answers that a job asks for: those to its first prompt first. Raises `Refused`."""
        prompts = self._prompts(parameters)
        n, seed, most = parameters.get("n", 1), parameters.get("seed"), parameters.get("max_tokens")
        if type(n) is not int or not 1 <= n * len(prompts) <= MAX_CHOICES:
            raise Refused(f"n: must be a whole number, and with all prompts at most {MAX_CHOICES} answers")
        if seed is not None and (type(seed) is not int or not 0 <= seed <= MAX_SEED):
            raise Refused(f"seed: must be a whole number between 0 and {MAX_SEED}")
        given = {name: parameters[name] for name in _PASSED if parameters.get(name) is not None}
        bias = _bias(parameters.get("logit_bias") or {})
        return [
            TextParameters(
                prompt=prompt,
                max_tokens=self._room(prompt, parameters) if most is None else most,
                seed=None if seed is None else (seed + k) % (MAX_SEED + 1),
                stop=tuple(parameters.get("stop") or ()),
                logit_bias=bias,
                **given,
            )
            for prompt in prompts
            for k in range(n)
        ]

    def tally(self, requests: Sequence[TextParameters]) -> TextTally:
        return TextTally(self, [request.max_tokens for request in requests])

    def result(self, made: Sequence[Text], shelf: Shelf) -> dict[str, Any]:
        prompts = {text.prompt_tokens: text for text in made}  # one prompt's answers read it together
        choices = [
            {
                "text": text.text,
                "finish_reason": text.finish,
                "tokens": len(text.tokens),
                "logprobs": self.logprobs(text.logprobs),
            }
            for text in made
        ]
        return {
            "choices": choices,
            "prompt_tokens": [text.prompt_tokens for text in made],
            "cached_tokens": max(text.cached for text in prompts.values()),
        }

    def logprobs(self, given: Sequence[Logprob]) -> list[dict[str, Any]]:
        """As jobs carry them: a token is its text. The end token is left out, which is no part of the text."""
        return [
            {
                "token": self._piece(one.token),
                "logprob": one.logprob,
                "top": [{"token": self._piece(token), "logprob": value} for token, value in one.top],
            }
            for one in given
            if one.token not in self._runner.model.ends
        ]

    def _piece(self, token: int) -> str:
        text: str = self._runner.model.tokenizer.backend_tokenizer.decode([token], skip_special_tokens=False)
        return text

    def _room(self, prompt: tuple[int, ...], parameters: Mapping[str, Any]) -> int:
        room = min(self._runner.context, self._runner.pages.capacity * PAGE) - len(prompt)
        if room < 1:
            field = "messages" if "messages" in parameters else "prompt"
            raise Refused(f"{field}: {len(prompt)} tokens are more than the model's context of {self._runner.context}")
        return room

    def _prompts(self, parameters: Mapping[str, Any]) -> list[tuple[int, ...]]:
        if "messages" in parameters:
            return [self._chat(parameters["messages"])]
        prompts = parameters.get("prompts")
        if not isinstance(prompts, list) or not prompts:
            raise Refused("prompt: is missing")
        return [self._plain(prompt) for prompt in prompts]

    def _chat(self, messages: Any) -> tuple[int, ...]:
        tokenizer = self._runner.model.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise Refused("messages: the model has no chat template; ask for a completion")
        for message in messages:
            if any(token in message["content"] for token in self._controls):
                raise Refused("messages: a content holds one of the model's control tokens")
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # of a model's own template: roles in an order that it does not know
            raise Refused(f"messages: the model's chat template refuses them ({type(error).__name__})") from error
        return self._ids(text)

    def _ids(self, text: str) -> tuple[int, ...]:
        # Not by transformers' own call, which changes the tokenizer and is not made for several threads.
        return tuple(self._runner.model.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    def _plain(self, prompt: Any) -> tuple[int, ...]:
        if isinstance(prompt, list):
            return tuple(prompt)
        start = self._runner.model.tokenizer.bos_token_id
        return self._ids(prompt) if start is None else (start, *self._ids(prompt))


def _bias(given: Any) -> tuple[tuple[int, float], ...]:
    """JSON's names are texts. Raises `Refused`."""
    if not isinstance(given, dict) or not all(token.isdecimal() and len(token) < 20 for token in given):
        raise Refused("logit_bias: must be an object of token ids and numbers")
    return tuple((int(token), value) for token, value in given.items())


class TextTally:
    """What a job's answers have come to: tokens are told as they are counted, texts in pieces (`written`)."""

    def __init__(self, panel: TextPanel, most: Sequence[int]) -> None:
        self._panel = panel
        self._most = sum(most)
        self._tokens = [0] * len(most)
        self.written = Written(len(most))

    def take(self, index: int, outcome: Outcome) -> dict[str, Any] | None:
        delta = outcome.token
        if delta is None:
            return None
        self._tokens[index] += len(delta.tokens)
        self.written.add(index, delta.text, self._panel.logprobs(delta.logprobs))
        return {"steps_done": sum(self._tokens), "steps": self._most}

"""Handles text jobs: tokenizes messages or prompts, and turns the engine's answers into the job's result.

Imports no torch at module level, because the worker imports it before torch.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from contract.bodies import check_bounds
from contract.bounds import next_seed
from contract.card import MAX_CHOICES, TextCard, TextCosts, TextOffer
from contract.errors import CONTEXT_LENGTH, Invalid
from contract.messages import MAX_CHARACTERS
from contract.text import (
    LATER_OPTIONS,
    MAX_BIASED,
    MAX_INPUT_TOKENS,
    MAX_LOGPROBS,
    MAX_PROMPT_LOGPROBS,
    MAX_STOPS,
    TextJob,
)
from contract.tools import CALLS, MESSAGES, PLAIN, TOOLS, texts_in
from core.batching.request import Outcome
from llm.grammars import tool_calls
from llm.parameters import Logprob, TextParameters, check
from llm.text import token_text
from workers.handlers import Output
from workers.text.stream_buffer import StreamBuffer

if TYPE_CHECKING:
    from llm.parameters import GeneratedText
    from llm.runner import TextRunner
    from workers.artifact_writer import ArtifactWriter

_USUAL = 64  # tokens of an answer in the reported capacity
_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
# Converted from the job's fields.
_OTHERWISE = ("prompt", "max_tokens", "seed", "stop", "stop_token_ids", "logit_bias", "json_schema")
_PASSED = [item.name for item in fields(TextParameters) if hasattr(TextJob, item.name) and item.name not in _OTHERWISE]


class TextJobHandler:
    """Handles text jobs: n answers to each prompt, with consecutive seeds."""

    modality = "text"

    def __init__(
        self,
        runner: TextRunner,
        *,
        resident: Callable[[], TextRunner | None] | None = None,
        load_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`resident` returns the runner while it is in memory; without it, it always is. `load_s` returns how long it
        took to load.
        """
        self._resident = resident or (lambda: runner)
        self._load_s = load_s
        self.name = runner.model.name
        self.expansion_instruction = runner.model.expansion_instruction
        self.reads_files = False
        # What is read of the model without its weights, which may be evicted.
        self._model_tokenizer, self._ends = runner.model.tokenizer, runner.model.ends
        self._vocabulary = runner.model.vocabulary
        self._context, self._most_tokens = runner.context, min(runner.context, runner.pages.tokens)
        # More than what transformers calls special: the turn headers of Llama models are control tokens too.
        self._tokenizer = runner.model.tokenizer.backend_tokenizer
        added = self._tokenizer.get_added_tokens_decoder()
        self._controls = [token.content for token in added.values() if token.special]
        self._control_ids = frozenset(id for id, token in added.items() if token.special)
        self._tool_format = tool_calls.call_format(self._template([{}]) or "", self._controls)
        model, self._pooling = runner.model, runner.model.pooling
        self._offer = TextOffer(
            context=runner.context,
            max_prompt_characters=MAX_CHARACTERS,
            max_stops=MAX_STOPS,
            max_logprobs=MAX_LOGPROBS,
            max_prompt_logprobs=MAX_PROMPT_LOGPROBS,
            max_logit_bias=MAX_BIASED,
            cache_tokens=runner.pages.tokens,
            tool_format=self._tool_format,
            embedding_dimensions=0 if model.pooling.reason else int(model.config.hidden_size),
            generates=model.generates,
            beam_search=model.generates,
            token_bytes=token_text.longest_token_bytes(self._tokenizer),
            options=LATER_OPTIONS,
        )
        self._card = None if resident is None else self._card_of(runner)

    @property
    def load_s(self) -> float:
        return 0.0 if self._resident() is not None else self._load_s()

    def card(self) -> TextCard:
        """The model's card; the last one if it is not in memory."""
        runner = self._resident()
        if runner is None:
            assert self._card is not None
            return replace(self._card, loaded=False)
        self._card = self._card_of(runner)
        return self._card

    def _card_of(self, runner: TextRunner) -> TextCard:
        rows = [count for count in _WIDTHS if count <= runner.limit("text")]
        token_s = min(runner.cost("text", count) / count for count in rows)
        return TextCard(
            name=self.name,
            precision=runner.model.precision,
            kernels=runner.execution.kernels,
            kernels_reason=runner.execution.kernels_reason,
            device=str(runner.model.device),
            limits=self._offer,
            costs=TextCosts(token_s=token_s, solo_token_s=runner.cost("text", 1)),
            capacity_per_s=1 / token_s / _USUAL,
            expansion_instruction=self.expansion_instruction,
            load_s=self._load_s(),
            adapters=() if runner.adapters is None else tuple(runner.adapters.asset_names()),
        )

    def read(self, parameters: Mapping[str, Any]) -> TextJob:
        return TextJob.read(parameters)

    def files(self, job: TextJob) -> set[str]:
        return job.files()

    def held_files(self) -> tuple[str, ...]:
        return ()

    def requests(self, job: TextJob) -> list[TextParameters]:
        """The engine requests of a job, in the order of its prompts. Raises `Invalid`."""
        if job.embedding is not None:
            return self._embedding_requests(job)
        prompts = self._prompts(job)
        if type(job.n) is not int or not 1 <= job.n * len(prompts) <= MAX_CHOICES:
            raise Invalid("n", f"must be a whole number; n times the number of prompts must be at most {MAX_CHOICES}")
        check_bounds(TextJob, {"seed": job.seed})
        values = {name: value for name in _PASSED if (value := getattr(job, name)) is not None}
        if job.beams:
            values.update(temperature=0.0, answers=job.n)
        bias = _bias(job.logit_bias or {})
        grammar = self._tool_grammar(job)
        rooms = [self._room(prompt, job) for prompt in prompts]
        if job.scores_prompts:
            _check_prompt_logprobs(job, sum(map(len, prompts)))
        return [
            TextParameters(
                prompt=prompt,
                max_tokens=room if job.max_tokens is None else job.max_tokens,
                seed=None if job.seed is None else next_seed(job.seed, k),
                stop=tuple(job.stop or ()),
                stop_token_ids=tuple(job.stop_token_ids or ()),
                ignore_end=bool(job.ignore_eos),
                logit_bias=bias,
                json_schema=job.json_schema if grammar is None else None,
                tool_grammar=grammar,
                prompt_logprobs=job.scores_prompts,
                continues=job.messages is None,
                **values,
            )
            for prompt, room in zip(prompts, rooms, strict=True)
            for k in range(1 if job.beams else job.n)
        ]

    def _embedding_requests(self, job: TextJob) -> list[TextParameters]:
        """The requests of an embedding job, checked, so that errors name the job's field. Raises `Invalid`."""
        job.check(self._offer)
        encode = self._tokenizer.encode  # with the special tokens that the tokenizer adds to a text
        requests = [
            TextParameters(tuple(ids), 0, embed=True, adapter=job.adapter or "")
            for ids in (prompt if isinstance(prompt, list) else encode(prompt).ids for prompt in job.prompts or [])
        ]
        tokens = sum(len(request.prompt) for request in requests)
        if tokens > MAX_INPUT_TOKENS:
            raise Invalid("input", f"{tokens} tokens are more than the {MAX_INPUT_TOKENS} of a request")
        for request in requests:
            try:
                check(request, vocabulary=self._vocabulary, context=self._most_tokens)
            except Invalid as error:
                raise error.of("input") from error
        return requests

    def tally(self, requests: Sequence[TextParameters]) -> TextJobProgress:
        # Log probabilities of prompts come with the whole text, at the end: they are too many for the engine's thread.
        hidden = any(request.prompt_logprobs for request in requests)
        limits = [(request.max_tokens or 1) * max(1, request.beams) for request in requests]
        first = requests[0] if requests else TextParameters((), 0)
        ends = self._ends_of(first.stop_token_ids, own=not first.ignore_end)
        return TextJobProgress(self, limits, ends, hidden=hidden)

    def build_result(self, job: TextJob, outputs: Sequence[Output], artifact_writer: ArtifactWriter) -> dict[str, Any]:
        texts: list[GeneratedText] = [output.value for output in outputs]
        if job.embedding is not None:
            return self._embeddings(job, texts)
        ends = self._ends_of(job.stop_token_ids or (), own=not job.ignore_eos)
        texts = [answer for text in texts for answer in (text, *text.alternatives)]
        prompts = {text.prompt_tokens: text for text in texts}  # answers to the same prompt share its prefill
        choices = [
            {
                "text": text.text,
                "finish_reason": text.finish,
                "tokens": len(text.tokens),
                "logprobs": self.logprobs(text.logprobs, ends),
                **({} if text.cumulative_logprob is None else {"cumulative_logprob": text.cumulative_logprob}),
            }
            for text in texts
        ]
        if job.scores_prompts:
            for index, (choice, text) in enumerate(zip(choices, texts, strict=True)):
                choice.update(self._echo((job.prompts or [])[index // job.n], text))
        return {
            "choices": choices,
            "prompt_tokens": [text.prompt_tokens for text in texts],
            "cached_tokens": max(text.cached for text in prompts.values()),
        }

    def _embeddings(self, job: TextJob, outputs: Sequence[GeneratedText]) -> dict[str, Any]:
        """The result of an embedding job: vectors in fp32, little-endian, as base64."""
        from llm.features.pooling import embedding

        pooling = self._pooling
        vectors = [embedding(text.pooled, pooling, job.dimensions) for text in outputs]
        return {
            "embeddings": [base64.b64encode(vector).decode() for vector in vectors],
            "choices": [],
            "prompt_tokens": [text.prompt_tokens for text in outputs],
            "cached_tokens": sum(text.cached for text in outputs),
        }

    def _ends_of(self, stops: Sequence[int], *, own: bool) -> frozenset[int]:
        """Return the tokens that end an answer: the request's `stops`, and the model's own unless it goes on there."""
        return frozenset((*stops, *(self._ends if own else ())))

    def logprobs(self, tokens: Sequence[Logprob], ends: frozenset[int]) -> list[dict[str, Any]]:
        """Return log probabilities as stored in the job, with each token's text, without the `ends`."""
        return [self._entry(entry) for entry in tokens if entry.token not in ends]

    def _entry(self, entry: Logprob) -> dict[str, Any]:
        top = [{**self._piece(token), "logprob": value} for token, value in entry.top]
        return {**self._piece(entry.token), "logprob": entry.logprob, "top": top}

    def _piece(self, token: int) -> dict[str, Any]:
        return token_text.describe(self._tokenizer, token)

    def _echo(self, prompt: str | list[int], text: GeneratedText) -> dict[str, Any]:
        """The text and the log probabilities of a choice that begins with its prompt, whose first token has none.

        The end token is not left out: who scores texts counts one entry for each token.
        """
        echoed = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, skip_special_tokens=True)
        tokens = [self._plain(prompt)[0], *(entry.token for entry in text.prompt_logprobs)]
        entries = [self._entry(entry) for entry in (*text.prompt_logprobs, *text.logprobs)]
        entries.insert(0, {**self._piece(tokens[0]), "logprob": None, "top": []})
        for k, token in enumerate(tokens):
            if token not in self._control_ids:
                entries[k].update(token_text.describe(self._tokenizer, token, first=True))
                break
        written = range(len(tokens) - len(self._ids(prompt)), len(tokens)) if isinstance(prompt, str) else range(0)
        for k, entry in enumerate(entries):
            if entry["id"] in self._control_ids and k not in written:  # it is in none of the text that is read
                entry["control"] = True
        return {"text": echoed + text.text, "logprobs": entries}

    def _room(self, prompt: tuple[int, ...], job: TextJob) -> int:
        """How many tokens may come after a prompt. Raises `Invalid`, naming its field, if there is no room for one."""
        room = self._most_tokens - len(prompt)
        if job.beams:  # each with pages of its own, and two to come
            from llm.cache.pages import PAGE

            pages = (self._offer.cache_tokens - len(prompt)) // PAGE // job.beams
            room = min(room, (pages - 2) * PAGE)
        if room < (0 if job.max_tokens == 0 else 1):
            field = "prompt" if job.messages is None else MESSAGES
            words = f"{len(prompt)} tokens are more than the model's context of {self._context}"
            raise Invalid(field, words, CONTEXT_LENGTH)
        return room

    def _prompts(self, job: TextJob) -> list[tuple[int, ...]]:
        if job.messages is not None:
            return [self._chat(job.messages, job.tools, job.chat_template_kwargs or {})]
        if not isinstance(job.prompts, list) or not job.prompts:
            raise Invalid("prompt", "is missing")
        return [self._plain(prompt) for prompt in job.prompts]

    def _tool_grammar(self, job: TextJob) -> str | None:
        if not job.tools or self._tool_format not in CALLS:
            return None
        return tool_calls.tool_grammar(
            self._tool_format, job.tools, required=bool(job.tools_required),
            parallel=job.parallel_tool_calls is not False, answer=job.json_schema,
        )  # fmt: skip

    def _template(self, tools: Any) -> str | None:
        """The chat template for requests with these tools, or without; None if there is none."""
        tokenizer = self._model_tokenizer
        return tokenizer.get_chat_template(tools=tools) if getattr(tokenizer, "chat_template", None) else None

    def _chat(self, messages: Any, tools: Any = None, options: Mapping[str, Any] = {}) -> tuple[int, ...]:
        if self._template(None) is None:
            raise Invalid(MESSAGES, "the model has no chat template; ask for a completion")
        for field, value in ((MESSAGES, messages), (TOOLS, tools), ("chat_template_kwargs", dict(options))):
            for text in texts_in(value):
                if any(token in text for token in self._controls):
                    raise Invalid(field, "a content holds one of the model's control tokens")
        tools = tool_calls.described(tools) if tools and self._tool_format != PLAIN else None
        if self._tool_format == PLAIN:
            messages = tool_calls.as_texts(messages)
        try:
            text = self._model_tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False, **options
            )
        except Exception as error:  # raised by the model's own template: an unexpected order of roles
            raise Invalid(MESSAGES, f"the model's chat template refuses them ({type(error).__name__})") from error
        return self._ids(text)

    def _ids(self, text: str) -> tuple[int, ...]:
        # Not transformers' `__call__`, which mutates the tokenizer and is not thread-safe.
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _plain(self, prompt: Any) -> tuple[int, ...]:
        if isinstance(prompt, list):
            return tuple(prompt)
        start = self._model_tokenizer.bos_token_id
        return self._ids(prompt) if start is None else (start, *self._ids(prompt))


def _check_prompt_logprobs(job: TextJob, tokens: int) -> None:
    """Raise `Invalid` for more log probabilities of prompts of so many tokens than a job may have."""
    count = tokens * job.n * (1 + (job.logprobs or 0))
    if count > MAX_PROMPT_LOGPROBS:
        raise Invalid(
            "echo",
            f"the log probabilities of {tokens} tokens of prompts would be {count}, those of the likeliest included; "
            f"at most {MAX_PROMPT_LOGPROBS} are returned",
        )


def _bias(bias: Any) -> tuple[tuple[int, float], ...]:
    """Logit bias from JSON, where keys are strings. Raises `Invalid`."""
    if not isinstance(bias, dict) or not all(token.isdecimal() and len(token) < 20 for token in bias):
        raise Invalid("logit_bias", "must be an object of token ids and numbers")
    return tuple((int(token), value) for token, value in bias.items())


class TextJobProgress:
    """A job's progress: token counts, and pieces of its texts (`written`)."""

    def __init__(self, handler: TextJobHandler, limits: Sequence[int], ends: frozenset[int], *, hidden: bool) -> None:
        """`ends` are the tokens that end an answer. `hidden`: the texts are told at the end only."""
        self._handler = handler
        self._ends = ends
        self._hidden = hidden
        self._most = sum(limits)
        self._tokens = [0] * len(limits)
        self.written = StreamBuffer(len(limits))

    def take(self, index: int, outcome: Outcome) -> dict[str, Any] | None:
        delta = outcome.token
        if delta is None:
            return None
        self._tokens[index] += len(delta.tokens) or outcome.finished  # one where only the prompt is read
        if not self._hidden:
            self.written.add(index, delta.text, self._handler.logprobs(delta.logprobs, self._ends))
        return {"steps_done": sum(self._tokens), "steps": self._most}

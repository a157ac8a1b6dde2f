"""Text sources: an engine in this process, or a running service."""

from __future__ import annotations

import secrets
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from contract.text import TextJob
from evaluation.service import ServiceClient, SourceError
from lab.captions.caption_client import CaptionRequest

if TYPE_CHECKING:
    from core.batching.engine import Engine
    from llm.runner import TextRunner


class TextResponse(NamedTuple):
    """A text. `whole`: it ended by itself, not at the token limit."""

    text: str
    complete: bool


class TextSource(Protocol):
    """Used from one thread. `width` questions keep it full."""

    width: int
    name: str
    chat: bool  # whether it has a chat template
    expansion_instruction: str  # the system message of its prompt expansion; "": it was not trained for that

    @property
    def about(self) -> dict[str, Any]:
        """Settings that must be equal for all captions of a file."""
        ...

    def submit(self, question: CaptionRequest) -> Future[Any]: ...

    def answer(self, result: Any) -> TextResponse:
        """The answer from a future's result."""
        ...


class LocalTextEngine:
    """The engine of this process."""

    def __init__(self, engine: Engine, runner: TextRunner, width: int) -> None:
        from workers.text.handler import TextJobHandler

        self.width = width
        self.name = runner.model.name
        self.expansion_instruction = runner.model.expansion_instruction
        self.chat = bool(getattr(runner.model.tokenizer, "chat_template", None))
        self._engine, self._runner, self._panel = engine, runner, TextJobHandler(runner)

    @property
    def about(self) -> dict[str, Any]:
        model = self._runner.model
        return {"model": model.name, "weights": model.digest, "precision": model.precision, "device": model.device.type}

    def check(self, question: CaptionRequest) -> None:
        """Raises `Invalid` for a question that the model does not accept."""
        from core.batching.request import Request

        self._runner.check(Request("check", "text", self._wanted(question)))

    def submit(self, question: CaptionRequest) -> Future[Any]:
        """Submit a question; one that `check` would not accept fails its future."""
        from contract.errors import Invalid
        from core.batching.pending import rejected
        from core.batching.request import Request

        try:
            return self._engine.submit(Request(secrets.token_hex(8), "text", self._wanted(question)))
        except Invalid as error:
            return rejected(error)

    def answer(self, result: Any) -> TextResponse:
        return TextResponse(result.text, result.finish == "stop")

    def _wanted(self, question: CaptionRequest) -> Any:
        fields = {} if question.chat else {"prompts": [question.prompt]}
        return self._panel.requests(TextJob.read(question.fields() | fields))[0]


class RemoteTextService:
    """A service, through its chat or its plain completions. Each request waits on its own thread."""

    def __init__(self, url: str, key: str | None = None, model: str | None = None, *, width: int = 64) -> None:
        """Raises `SourceError` if no service answers, none has the model, or the key is rejected."""
        self._service = ServiceClient(url, key, width=width)
        self.width = width
        self.name, self._card = self._service.model("text", model)
        self.expansion_instruction = str(self._card.get("expansion_instruction", ""))
        self.chat = self._chats()

    @property
    def about(self) -> dict[str, Any]:
        return {"model": self.name, "precision": self._card.get("precision")}

    def submit(self, question: CaptionRequest) -> Future[Any]:
        fields = {"model": self.name, **question.fields()}
        if question.chat:
            return self._service.submit(self._service.post, "/v1/chat/completions", fields)
        return self._service.submit(self._service.post, "/v1/completions", fields | {"prompt": question.prompt})

    def answer(self, result: Any) -> TextResponse:
        choice = result["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return TextResponse(text or "", choice["finish_reason"] == "stop")

    def _chats(self) -> bool:
        """Cards do not say whether a model has a chat template, so one token is requested."""
        hello = {"model": self.name, "messages": [{"role": "user", "content": "a cat"}], "max_tokens": 1, "seed": 0}
        try:
            self._service.post("/v1/chat/completions", hello)
        except SourceError as error:
            if error.field == "messages":  # the only possible cause of an error
                return False
            raise
        return True

    def close(self) -> None:
        self._service.close()

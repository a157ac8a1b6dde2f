"""`diptych chat`: a conversation with the text model on the terminal, in this process or through a running service."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from cli.arguments import CommandFailed, Commands, UsageError, add_command, add_settings, check_range, read_settings
from contract.precision import PRECISIONS
from contract.printable import printable_lines

if TYPE_CHECKING:
    from core.config import Settings

_ABOUT = """Without a TEXT it asks line by line until the end of its input; the conversation is remembered as far as the
model's context allows. With a TEXT it answers that and ends.
"""
_ANSWER_S = 600.0

Messages = list[dict[str, str]]
Reply = Callable[[Messages], Iterator[str]]
"""Pieces of the answer to a conversation."""


def add(commands: Commands) -> None:
    chat = add_command(commands, "chat", "talk with the text model", "Talk with the text model.", _ABOUT)
    chat.add_argument("text", nargs="?", help="what to say; default: what is typed, or comes through a pipe")
    add_settings(chat, "text_model", "text_draft", "threads")
    chat.add_argument("--text-precision", choices=tuple(PRECISIONS), help="of the computation")
    chat.add_argument("--url", metavar="URL", help="of a service to talk through, instead of loading a model here")
    chat.add_argument("--key", metavar="KEY", help="for a service that asks for one")
    chat.add_argument("--system", metavar="TEXT", help="said to the model beforehand")
    chat.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default: the likeliest words")
    chat.add_argument(
        "--max-tokens", type=int, metavar="N", help="of an answer; default: what the context has room for"
    )
    chat.add_argument("--seed", type=int, metavar="N", help="for the same answer each time, where T is not 0")
    chat.set_defaults(run=_chat)


def _chat(options: argparse.Namespace) -> int:
    check_range(options, "temperature", 0, 2)
    check_range(options, "max_tokens", 1)
    settings = read_settings(options)
    if options.url is not None:
        _talk(options, _through(options))
        return 0
    with _Here(settings, options) as reply:
        _talk(options, reply)
    return 0


def _talk(options: argparse.Namespace, reply: Reply) -> None:
    messages: Messages = [{"role": "system", "content": options.system}] if options.system else []
    lines = iter([options.text]) if options.text is not None else _lines()
    for text in lines:
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        answer = ""
        for piece in reply(messages):
            print(printable_lines(piece), end="", flush=True)
            answer += piece
        print()
        messages.append({"role": "assistant", "content": answer})


def _lines() -> Iterator[str]:
    while True:
        if sys.stdin.isatty():
            try:
                yield input("> ")
            except EOFError:
                print()
                return
        else:
            yield from (line.rstrip("\n") for line in sys.stdin)
            return


class _Here:
    """The model in this process, with an engine of its own."""

    def __init__(self, settings: Settings, options: argparse.Namespace) -> None:
        self._settings = settings
        self._options = options

    def __enter__(self) -> Reply:
        from rich.console import Console

        from core.batching.engine import Engine
        from core.batching.runner import Lane
        from pipeline.checkpoints.folder import ModelError
        from workers.build import text_runner
        from workers.text_handler import TextJobHandler

        self._lane = Lane("text")
        try:
            with Console(stderr=True).status("starting") as status:
                runner = text_runner(self._settings, self._lane, status.update)
        except ModelError as error:
            raise UsageError(f"--text-model: {error}") from error
        if runner is None:
            raise UsageError("--text-model: not set, and models/emoji-lm is not installed")
        self._engine = Engine([runner])
        self._panel = TextJobHandler(runner)
        self._count = 0
        return self._reply

    def __exit__(self, *_: object) -> None:
        self._engine.close()
        self._lane.close()

    def _reply(self, messages: Messages) -> Iterator[str]:
        import queue

        from contract.errors import Invalid
        from contract.text import TextJob
        from core.batching.request import Outcome, Request

        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def hear(_: Request, outcome: Outcome) -> None:
            if outcome.token is not None:
                pieces.put(outcome.token.text)

        options = self._options
        try:
            job = TextJob(
                messages=messages, temperature=options.temperature, max_tokens=options.max_tokens, seed=options.seed
            )
            (requests,) = self._panel.requests(job)
            self._count += 1
            future = self._engine.submit(Request(f"chat-{self._count}", "text", requests, listener=hear))
        except Invalid as error:
            raise UsageError(str(error)) from error
        # The engine resolves a future after its listener was told everything.
        future.add_done_callback(lambda _: pieces.put(None))
        while (piece := pieces.get()) is not None:
            yield piece
        future.result()


def _through(options: argparse.Namespace) -> Reply:
    """The model behind a service's address."""
    address = options.url.rstrip("/") + "/v1/chat/completions"

    def reply(messages: Messages) -> Iterator[str]:
        import urllib.error
        import urllib.request

        body: dict[str, Any] = {"messages": messages, "temperature": options.temperature, "stream": True}
        body |= {name: value for name in ("max_tokens", "seed") if (value := getattr(options, name)) is not None}
        headers = {"Content-Type": "application/json"}
        if options.key:
            headers["Authorization"] = f"Bearer {options.key}"
        try:
            request = urllib.request.Request(address, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
                yield from _pieces(line.decode("utf-8").rstrip("\r\n") for line in answer)
        except urllib.error.HTTPError as error:
            raise CommandFailed(_message(error.read())) from error
        except (OSError, ValueError) as error:
            raise UsageError(f"--url: nothing answers at {address} ({error})") from error

    return reply


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        data = line.removeprefix("data: ")
        if data in ("", "[DONE]"):
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise CommandFailed(str(chunk["error"]["message"]))
        for choice in chunk["choices"]:
            yield choice["delta"].get("content") or ""


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "the service refused, and did not say why"

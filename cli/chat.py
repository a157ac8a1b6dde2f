"""`diptych chat`: a conversation with the text model on the terminal, in this process or through a running service."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from cli.arguments import (
    CommandFailed,
    Commands,
    UsageError,
    add_command,
    add_settings,
    check_range,
    open_texts,
    read_settings,
)
from contract.precision import PRECISIONS
from contract.printable import printable_lines

if TYPE_CHECKING:
    from core.batching.engine import Engine
    from llm.runner import TextRunner

_ABOUT = """Without a TEXT it asks line by line until the end of its input; the conversation is remembered as far as the
model's context allows. With a TEXT it answers that and ends.
"""
_ANSWER_S, _PATH = 600.0, "/v1/chat/completions"

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
    from rich.console import Console

    check_range(options, "temperature", 0, 2)
    check_range(options, "max_tokens", 1)
    settings = read_settings(options)
    if options.url is not None:
        _talk(options, _service_replies(options))
        return 0
    with open_texts(settings, Console(stderr=True)) as (engine, runner):
        _talk(options, _local_replies(options, engine, runner))
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


def _local_replies(options: argparse.Namespace, engine: Engine, runner: TextRunner) -> Reply:
    """Return what answers messages by the model in this process."""
    import queue
    from itertools import count

    from contract.errors import Invalid
    from contract.text import TextJob
    from core.batching.request import Outcome, Request
    from workers.text.handler import TextJobHandler

    handler, numbers = TextJobHandler(runner), count(1)

    def reply(messages: Messages) -> Iterator[str]:
        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def hear(_: Request, outcome: Outcome) -> None:
            if outcome.token is not None:
                pieces.put(outcome.token.text)

        try:
            job = TextJob(
                messages=messages, temperature=options.temperature, max_tokens=options.max_tokens, seed=options.seed
            )
            (parameters,) = handler.requests(job)
            future = engine.submit(Request(f"chat-{next(numbers)}", "text", parameters, listener=hear))
        except Invalid as error:
            raise UsageError(str(error)) from error
        # The engine resolves a future after its listener was told everything.
        future.add_done_callback(lambda _: pieces.put(None))
        while (piece := pieces.get()) is not None:
            yield piece
        future.result()

    return reply


def _service_replies(options: argparse.Namespace) -> Reply:
    """Return what answers messages by the service at `--url`."""
    from evaluation.service import ServiceClient, SourceError

    def reply(messages: Messages) -> Iterator[str]:
        body: dict[str, Any] = {"messages": messages, "temperature": options.temperature, "stream": True}
        named = {"model": options.text_model, "max_tokens": options.max_tokens, "seed": options.seed}
        body |= {name: value for name, value in named.items() if value is not None}
        try:
            for event in ServiceClient(options.url, options.key).stream(_PATH, body, timeout_s=_ANSWER_S):
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""
        except SourceError as error:
            if error.reason is not None:
                raise CommandFailed(error.reason) from error
            raise UsageError(f"--url: nothing answers at {options.url.rstrip('/')}{_PATH} ({error})") from error

    return reply

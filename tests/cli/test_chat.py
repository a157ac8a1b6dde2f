"""`diptych chat`: one question, a conversation through a pipe, a service's address, and what is refused."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from contract.printable import printable_lines
from deployment.redis import free_port
from llm.families.tiny import TINY
from tests.cli.shell import Shell
from tests.http_server import Handler, LocalServer
from tests.llm import stage

HERE = ("chat", "--text-model", TINY, "--max-tokens", "8", "--threads", "1")


def test_it_answers_one_text(shell: Shell) -> None:
    said = shell.done(*HERE, "hello")
    with stage.serving(stage.small()) as (engine, _):
        (wanted,) = stage.answers(engine, [stage.greedy(stage.chat(stage.small(), "hello"), 8)])
    assert said.out == wanted.text + "\n"


def test_it_remembers_the_conversation(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    said = shell(*HERE, "--system", "Be brief.")
    model = stage.small()
    messages = [{"role": "system", "content": "Be brief."}]
    wanted = []
    with stage.serving(model) as (engine, _):
        for text in ("one", "two"):
            messages.append({"role": "user", "content": text})
            ids = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            (answer,) = stage.answers(engine, [stage.greedy(tuple(ids), 8)])
            messages.append({"role": "assistant", "content": answer.text})
            wanted.append(printable_lines(answer.text))
    assert said.code == 0 and said.out == "".join(f"{text}\n" for text in wanted)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--temperature 3 x", "--temperature: must be between 0 and 2, not 3"),
        ("--text-model no/such x", "--text-model: text: "),
        ("--text-model off x", "--text-model: not set"),
        (f"--text-model {TINY} {'x' * 600}", "messages: 60"),
        (f"--seed -1 --text-model {TINY} x", "seed: must be between 0 and 9223372036854775807, not -1"),
        (f"--url http://127.0.0.1:{free_port()} x", "--url: nothing answers at http"),
    ],
)
def test_what_is_refused(shell: Shell, arguments: str, said: str) -> None:
    found = shell("chat", *arguments.split())
    assert found.code == 2 and found.out == "" and found.err.startswith(f"diptych: {said}")


@pytest.fixture
def service() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Stands for a service: what it was asked, and an answer in two pieces, or an error for those without a key."""
    asked: list[dict[str, Any]] = []

    class Page(Handler):
        def respond(self) -> None:
            asked.append(json.loads(self.body()))
            if self.headers["Authorization"] != "Bearer good":
                self.answer(401, b'{"error": {"message": "An API key is required."}}')
                return
            chunks = [{"choices": [{"delta": {"content": text}}]} for text in ("Hel", "lo")]
            pieces = [*map(json.dumps, chunks), "[DONE]"]
            self.answer(200, "".join(f"data: {piece}\n\n" for piece in pieces).encode())

    with LocalServer(Page) as server:
        yield server.url, asked


def test_it_talks_through_a_service(shell: Shell, service: tuple[str, list[dict[str, Any]]]) -> None:
    url, asked = service
    said = shell("chat", "--url", url, "--key", "good", "--seed", "3", "hi")
    assert (said.code, said.out) == (0, "Hello\n")
    assert asked == [{"messages": [{"role": "user", "content": "hi"}], "temperature": 0.0, "stream": True, "seed": 3}]
    said = shell("chat", "--url", url, "hi")
    assert said.code == 1 and said.err == "diptych: An API key is required.\n"

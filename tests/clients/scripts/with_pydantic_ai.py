"""pydantic-ai."""

from typing import Any

from harness import KEY, TEXT, URL, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(TEXT, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY))


class Emoji(BaseModel):
    happy: bool


def ask(**options: Any) -> Any:
    return Agent(model, model_settings={"max_tokens": 60}, **options).run_sync("a cat").output


def stream() -> str:
    answer = Agent(model, model_settings={"max_tokens": 20}).run_stream_sync("a cat")
    return [*answer.stream_text()][-1]


run({
    "chat": ask,
    "stream": stream,
    "parse": lambda: ask(output_type=NativeOutput(Emoji)).happy,
    "tools": lambda: ask(output_type=Emoji).happy,
})  # fmt: skip

"""openai-python."""

import base64
from pathlib import Path
from typing import Any

from harness import IMAGE, KEY, PICTURE, TEXT, URL, png_size, run
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

client = OpenAI(base_url=f"{URL}/v1", api_key=KEY)
MESSAGES: list[Any] = [{"role": "user", "content": "a cat"}]


class Emoji(BaseModel):
    happy: bool


def picture(answer: Any) -> list[int]:
    return png_size(base64.b64decode(answer.data[0].b64_json))


def stream_image() -> list[int]:
    events = client.images.generate(prompt="a cat", model=IMAGE, stream=True, partial_images=1)
    return png_size(base64.b64decode([event.b64_json for event in events][-1]))


def chat() -> str | None:
    answer = client.chat.completions.create(model=TEXT, messages=MESSAGES, max_tokens=8)
    return answer.choices[0].message.content


def stream() -> str:
    chunks = client.chat.completions.create(model=TEXT, messages=MESSAGES, max_tokens=8, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def parse() -> bool:
    answer = client.chat.completions.parse(model=TEXT, messages=MESSAGES, max_tokens=20, response_format=Emoji)
    parsed = answer.choices[0].message.parsed
    assert parsed is not None
    return parsed.happy


def tools() -> list[str]:
    """A call, streamed, whose result is answered."""
    ask: dict[str, Any] = {"model": TEXT, "tools": [pydantic_function_tool(Emoji)], "max_tokens": 60}
    with client.chat.completions.stream(**ask, messages=MESSAGES, tool_choice="required") as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls or []
    assert "tool_calls.function.arguments.done" in kinds and isinstance(call.function.parsed_arguments, Emoji)
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    answer = client.chat.completions.create(**ask, messages=[*MESSAGES, message, result])
    return [call.function.name, answer.choices[0].finish_reason]


def responses() -> list[Any]:
    """A streamed text, a parsed answer, and a call."""
    with client.responses.stream(model=TEXT, input="a cat", max_output_tokens=8) as stream:
        kinds = [event.type for event in stream]
        text = stream.get_final_response().output_text
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete") and text
    parsed = client.responses.parse(model=TEXT, input="a cat", max_output_tokens=20, text_format=Emoji, store=False)
    assert parsed.output_parsed is not None
    tool: Any = {"type": "function", "name": "Emoji", "parameters": Emoji.model_json_schema(), "strict": True}
    called = client.responses.create(
        model=TEXT, input="a cat", max_output_tokens=60, tools=[tool], tool_choice="required", store=False
    )
    (call,) = called.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    after = client.responses.create(
        model=TEXT,
        input=[{"role": "user", "content": "a cat"}, call.model_dump(exclude_none=True), result],
        store=False,
    )
    return [type(parsed.output_parsed.happy).__name__, call.name, bool(after.output_text)]


def openai_model(name: str) -> list[int]:
    return picture(client.images.generate(prompt="a cat", model=name))


run({
    "generate": lambda: picture(client.images.generate(prompt="a cat", model=IMAGE)),
    "edit": lambda: picture(client.images.edit(image=Path(PICTURE), prompt="a hat", model=IMAGE)),
    "stream_image": stream_image,
    "chat": chat,
    "stream": stream,
    "parse": parse,
    "tools": tools,
    "responses": responses,
    "embed": lambda: len(client.embeddings.create(model=TEXT, input=["a cat", "a dog"]).data[1].embedding),
    "models": lambda: len(client.models.list().data),
    "gpt_image": lambda: openai_model("gpt-image-1"),
})  # fmt: skip

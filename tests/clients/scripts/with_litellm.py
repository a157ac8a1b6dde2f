"""litellm."""

import base64
from pathlib import Path
from typing import Any

import litellm
from harness import IMAGE, KEY, PICTURE, TEXT, URL, png_size, run

SERVICE: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": KEY}
CHAT: dict[str, Any] = {"model": f"openai/{TEXT}", "messages": [{"role": "user", "content": "a cat"}], "max_tokens": 8}


def picture(answer: Any) -> list[int]:
    return png_size(base64.b64decode(answer.data[0].b64_json))


def stream() -> str:
    chunks = litellm.completion(**CHAT, **SERVICE, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def embed() -> int:
    made = litellm.embedding(model=f"openai/{TEXT}", input=["a cat"], encoding_format="float", **SERVICE)
    return len(made.data[0]["embedding"])


def edit() -> list[int]:
    with Path(PICTURE).open("rb") as file:
        return picture(litellm.image_edit(model=f"openai/{IMAGE}", image=file, prompt="a hat", **SERVICE))


run({
    "generate": lambda: picture(litellm.image_generation(model=f"openai/{IMAGE}", prompt="a cat", **SERVICE)),
    "edit": edit,
    "chat": lambda: litellm.completion(**CHAT, **SERVICE).choices[0].message.content,
    "stream": stream,
    "embed": embed,
})  # fmt: skip

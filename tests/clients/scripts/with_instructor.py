"""instructor."""

import instructor
from harness import KEY, TEXT, URL, run
from openai import OpenAI
from pydantic import BaseModel


class Emoji(BaseModel, extra="forbid"):  # else a small model goes on with fields of its own
    happy: bool


def ask(mode: instructor.Mode) -> bool:
    client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key=KEY), mode=mode)
    happy: bool = client.create(
        model=TEXT, response_model=Emoji, messages=[{"role": "user", "content": "a cat"}], max_tokens=60, max_retries=0
    ).happy
    return happy


run({"parse": lambda: ask(instructor.Mode.JSON_SCHEMA), "tools": lambda: ask(instructor.Mode.TOOLS)})

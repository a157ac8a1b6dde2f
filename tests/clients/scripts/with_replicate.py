"""replicate-python; tests/clients/test_replicate.py has more."""

from pathlib import Path
from typing import Any

from harness import IMAGE, KEY, PICTURE, URL, png_size, run
from replicate import Client

client = Client(api_token=KEY, base_url=URL)
MODEL = f"diptych/{IMAGE}"


def generate(wait: bool, **input: Any) -> list[int]:
    (file,) = client.run(MODEL, input={"prompt": "a cat", **input}, wait=wait)
    return png_size(file.read())


run({
    "generate": lambda: generate(True),
    "poll": lambda: generate(False),
    "edit": lambda: generate(True, image=Path(PICTURE), prompt_strength=0.5),
    "stream": lambda: [event.event.value for event in client.stream(MODEL, input={"prompt": "a cat"})][-2:],
    "models": lambda: client.models.get(MODEL).latest_version.id,
})  # fmt: skip

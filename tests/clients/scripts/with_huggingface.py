"""huggingface_hub's InferenceClient."""

from harness import IMAGE, KEY, PICTURE, TEXT, URL, run
from huggingface_hub import InferenceClient

client = InferenceClient(base_url=URL, api_key=KEY)


def chat() -> str | None:
    answer = client.chat_completion([{"role": "user", "content": "a cat"}], model=TEXT, max_tokens=8)
    return answer.choices[0].message.content


run({
    "generate": lambda: list(client.text_to_image("a cat").size),
    "generate_by_model": lambda: list(
        InferenceClient(model=f"{URL}/v1/models/{IMAGE}", api_key=KEY).text_to_image("a cat").size
    ),
    "edit": lambda: list(client.image_to_image(PICTURE, prompt="a hat").size),
    "chat": chat,
})  # fmt: skip

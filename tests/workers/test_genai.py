"""What a job's span says in the words of OpenTelemetry, checked against the conventions' own list of names."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE

from contract.image import ImageJob, ImageParameters
from contract.text import TextJob
from core.jobs.record import Claim
from workers import genai

NAMES = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")} | {ERROR_TYPE}
CHAT = TextJob(
    messages=[{"role": "user", "content": "a secret"}], n=2, max_tokens=9, temperature=0.5, seed=3, stop=["secret"],
    json_schema='{"title": "secret"}',
)  # fmt: skip
IMAGE = ImageJob(picture=ImageParameters(prompt="a secret", width=128, height=128, seed=5), n=1)


def claim(modality: str, parameters: dict[str, Any]) -> Claim:
    return Claim("job_1", 1, modality, "some-model", parameters, 5, None, False)


def test_a_chat_and_an_image() -> None:
    job = claim("text", CHAT.to_dict())
    assert genai.request_attributes(job) == {
        "gen_ai.provider.name": "diptych", "gen_ai.request.model": "some-model", "gen_ai.operation.name": "chat",
        "gen_ai.output.type": "json", "gen_ai.request.choice.count": 2, "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5, "gen_ai.request.seed": 3,
    }  # fmt: skip
    choices = [{"text": "secret", "finish_reason": reason, "tokens": n} for reason, n in (("stop", 4), ("length", 9))]
    assert genai.outcome_attributes(job, {"choices": choices, "prompt_tokens": [7, 7], "cached_tokens": 0}) == {
        "gen_ai.response.model": "some-model", "gen_ai.response.finish_reasons": ["stop", "length"],
        "gen_ai.usage.input_tokens": 7, "gen_ai.usage.output_tokens": 13,
    }  # fmt: skip
    image = claim("image", IMAGE.to_dict())
    expected = {"operation.name": "generate_content", "output.type": "image", "request.seed": 5}
    found = genai.request_attributes(image)
    assert found.items() >= {(f"gen_ai.{name}", value) for name, value in expected.items()}
    assert "gen_ai.request.choice.count" not in found
    assert genai.outcome_attributes(image, {"images": []}) == {"gen_ai.response.model": "some-model"}
    assert genai.outcome_attributes(image, RuntimeError("a secret")) == {"error.type": "RuntimeError"}


@pytest.mark.parametrize("parameters", [CHAT.to_dict(), {"prompts": ["secret"]}, IMAGE.to_dict()])
@pytest.mark.parametrize("modality", ["image", "text"])
def test_names_are_the_conventions_and_no_value_is_a_clients_text(modality: str, parameters: dict[str, Any]) -> None:
    attributes = genai.request_attributes(claim(modality, parameters))
    assert attributes.keys() <= NAMES and "secret" not in str(attributes)


@pytest.mark.parametrize("value", [None, True, "7", [7]])
def test_a_damaged_record_is_left_to_the_handler(value: Any) -> None:
    attributes = genai.request_attributes(claim("text", {"n": value, "seed": value, "temperature": value}))
    assert not [name for name in attributes if name in ("gen_ai.request.choice.count", "gen_ai.request.seed")]

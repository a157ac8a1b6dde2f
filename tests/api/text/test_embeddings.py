"""Embeddings: the unmodified OpenAI client against a real engine, alone and in batches, and every refusal by name."""

from __future__ import annotations

import base64
import dataclasses
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import torch

from api.text.drafts import EMBEDDINGS
from contract.card import TextOffer
from contract.embeddings import EmbeddingFields
from contract.errors import Invalid
from contract.text import MAX_EMBEDDED, MAX_INPUTS
from core.config import Settings
from llm.families import tiny
from llm.features.pooling import Pooling
from tests.api.batches.test_text_batches import done, whole
from tests.api.world import Api, check_error, eventually
from tests.api.writing import TextWorker
from tests.llm import stage

WIDTH = tiny.SHAPES[tiny.TINY].width
TEXTS = ["a cat", "a very long story of a dog", "a cat"]
OFFER = TextOffer(context=256, embedding_dimensions=1024)


@pytest.fixture(scope="module")
def serving(module_settings: Settings) -> Iterator[TextWorker]:
    with TextWorker(module_settings, stage.small(), kernels=stage.kernels()) as worker:
        yield worker


@pytest.fixture(scope="module")
def shared(module_settings: Settings, serving: TextWorker) -> Iterator[Api]:
    with Api(module_settings) as api:
        yield api


def expected(text: str | list[int]) -> np.ndarray[Any, Any]:
    """What transformers computes of a text as its tokenizer reads it: the last state, of length 1."""
    ids = stage.small().tokenizer(text)["input_ids"] if isinstance(text, str) else text
    with stage.by_transformers(stage.small()) as network:
        state = network.model(torch.tensor([ids])).last_hidden_state[0, -1]
    return np.asarray(torch.nn.functional.normalize(state, dim=0))


def test_openais_client_gets_transformers_vectors(client: openai.OpenAI) -> None:
    made = client.embeddings.create(model=tiny.TINY, input=TEXTS, user="somebody")  # in base64, as it asks
    assert made.object == "list" and made.model == tiny.TINY
    assert [(one.object, one.index) for one in made.data] == [("embedding", k) for k in range(3)]
    for one, text in zip(made.data, TEXTS, strict=True):
        np.testing.assert_allclose(one.embedding, expected(text), atol=1e-5)
    tokens = sum(len(stage.small().tokenizer(text)["input_ids"]) for text in TEXTS)
    assert made.usage.prompt_tokens == made.usage.total_tokens == tokens
    (short,) = client.embeddings.create(model=tiny.TINY, input="a cat", dimensions=5).data
    first = expected("a cat")[:5]
    np.testing.assert_allclose(short.embedding, first / np.linalg.norm(first), atol=1e-5)


@pytest.mark.parametrize("given", [[[5, 6, 7], [8, 9]], [5, 6, 7], "a cat"])
def test_both_encodings_have_the_same_bits(shared: Api, given: Any) -> None:
    floats, packed = (
        [one["embedding"] for one in shared.post(EMBEDDINGS, input=given, **options).json()["data"]]
        for options in ({}, {"encoding_format": "base64"})
    )
    assert [struct.pack(f"<{WIDTH}f", *one) for one in floats] == [base64.b64decode(one) for one in packed]
    several = given if isinstance(given[0], list) else [given]
    np.testing.assert_allclose(floats, [expected(each) for each in several], atol=1e-5)


def test_a_job_is_erased_once_its_embeddings_are_delivered(shared: Api) -> None:
    def jobs() -> set[str]:
        return {job["id"] for job in shared.get("/v1/jobs").json()["data"]}

    before = jobs()
    assert len(shared.post(EMBEDDINGS, input=TEXTS).json()["data"]) == len(TEXTS)
    eventually(lambda: jobs() <= before, "it is kept")


def test_many_inputs_are_embedded_in_order(client: openai.OpenAI) -> None:
    inputs = [[3 + k % 200, 3 + k // 200] for k in range(400)]
    made = client.embeddings.create(model=tiny.TINY, input=inputs)
    assert [one.index for one in made.data] == [*range(len(inputs))]
    for k in (0, 199, 200, 399):
        np.testing.assert_allclose(made.data[k].embedding, expected(inputs[k]), atol=1e-5)


BAD: list[tuple[dict[str, Any], str | None, str | None]] = [
    ({}, "input", "missing_required_parameter"),
    *(
        ({"input": value}, "input", None)
        for value in ("", ["a", ""], [], [[]], ["a", [5]], [5.5], "a\x01", [99_999], [-1], [[3]] * (MAX_INPUTS + 1))
    ),
    ({"input": ["a", "word " * 500]}, "input", "context_length_exceeded"),
    ({"input": "a", "dimensions": 0}, "dimensions", None),
    ({"input": "a", "dimensions": WIDTH + 1}, "dimensions", None),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format", None),
    ({"input": "a", "stream": True}, "stream", None),
    ({"input": "a", "n": 1}, "n", "unknown_parameter"),
    ({"input": "a", "model": "gpt-none"}, "model", "model_not_found"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD)
def test_bad_input_is_refused_by_name(shared: Api, fields: dict[str, Any], param: str | None, code: str | None) -> None:
    error = check_error(shared.post(EMBEDDINGS, **fields), 404 if "model" in fields else 400, param, code)
    assert "word word" not in error["message"]


def test_batches_are_answered_and_refused_as_alone(shared: Api, client: openai.OpenAI) -> None:
    asked = [{"input": TEXTS, "dimensions": 4}, {"input": [5, 6], "encoding_format": "base64"}]
    bad = [fields for fields, _, _ in BAD]
    _, well, ill = done(client, EMBEDDINGS, *asked, *bad)
    assert list(well) == ["c0", "c1"] and len(ill) == len(bad)
    for line, fields in zip(well.values(), asked, strict=True):
        assert whole(line) == shared.post(EMBEDDINGS, **fields).json()
    for line, fields in zip(ill.values(), bad, strict=True):
        alone = shared.post(EMBEDDINGS, **fields)
        assert (line["response"]["status_code"], line["response"]["body"]) == (alone.status_code, alone.json())


def test_models_say_whether_they_embed(serving: TextWorker) -> None:
    assert serving.handler.card().limits.embedding_dimensions == WIDTH and serving.handler.card().limits.generates
    model = serving.runner.model
    serving.runner.model = dataclasses.replace(model, pooling=Pooling(reason="why"), generates=False)
    try:
        limits = type(serving.handler)(serving.runner).card().limits
    finally:
        serving.runner.model = model
    assert (limits.embedding_dimensions, limits.generates) == (0, False)


@pytest.mark.parametrize(
    ("count", "dimensions", "offer", "field"),
    [
        (MAX_EMBEDDED // 1024 + 1, None, OFFER, "input"),
        (1, 1025, OFFER, "dimensions"),
        (1, None, TextOffer(context=256), "model"),
    ],
)
def test_what_a_model_does_not_offer_is_named(count: int, dimensions: int | None, offer: TextOffer, field: str) -> None:
    wide = dataclasses.replace(EmbeddingFields(input="a", dimensions=dimensions).job(), prompts=["a"] * count)
    with pytest.raises(Invalid) as caught:
        wide.check(offer)
    assert caught.value.field == field
    dataclasses.replace(wide, prompts=["a"] * (MAX_EMBEDDED // 1024), dimensions=1024).check(OFFER)
    generated = dataclasses.replace(wide, embedding=None, max_tokens=1, prompts=["a"])
    with pytest.raises(Invalid, match="embeddings only"):
        generated.check(dataclasses.replace(OFFER, generates=False))

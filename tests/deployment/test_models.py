"""Several models of one worker, one added by `diptych models add`, through all parts of the service as it runs."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

import cli
from core.batching.request import Request
from core.config import EMBEDDED_TEXT_MODEL
from llm.checkpoints.load import load
from llm.families import tiny as tiny_text
from llm.parameters import TextParameters
from pipeline.checkpoints import tiny
from tests.deployment.served import Served, ready, wait_until
from tests.llm.stage import chat, serving
from tests.pipeline.original_layout import checkpoint

TUNED = ("one", "two", "three")
SHAPE = replace(tiny.SHAPES[tiny.TINY], input_channels=9)
TEXTS = ("emoji-lm", "poet", "scribe")
TEXT_MIB, TEXTS_MIB = 4, 30  # keys and values of a model; weights of emoji-lm are 21 MiB, and each other's are few


def as_url(array: np.ndarray) -> dict[str, str]:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, "PNG")
    return {"image_url": f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"}


PROMPT = "a cat"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One worker of four image models, a painter, added by the command, and fine-tunes of the embedded one's shape, of
    which two find room; and of three text models, of which two do.
    """
    folder = tmp_path_factory.mktemp("models")
    variables = {"DIPTYCH_MODELS_DIR": str(folder / "store"), "DIPTYCH_TEXT_MEMORY_MIB": str(TEXT_MIB)}
    save_file(checkpoint(tiny.make(SHAPE)), folder / "painter.safetensors")
    base = str(tiny.save(folder / "base", tiny.SHAPES[tiny.TINY]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIPTYCH_MODELS_DIR", variables["DIPTYCH_MODELS_DIR"])
        assert cli.main(["models", "add", str(folder / "painter.safetensors"), "--base", base]) == 0
    for seed, name in enumerate(TUNED):
        tiny.save(folder / "store" / name, tiny.SHAPES[tiny.EMOJI_XL], seed)
    for seed, name in enumerate(TEXTS[1:]):
        tiny_text.save(folder / "store" / name, tiny_text.SHAPES[tiny_text.TINY], seed)
    weights_mib = sum(file.stat().st_size for file in (folder / "store" / "one").rglob("*.safetensors")) // 2**20
    with ready(
        folder / "served", "--models", ",".join(["painter", *TUNED]), "--models-mib",
        f"{2 * weights_mib + weights_mib // 2}", "--text-models", ",".join(TEXTS), "--text-models-mib", str(TEXTS_MIB),
        model=None, variables=variables, unset=("DIPTYCH_TEXT_MODEL",),
    ) as service:  # fmt: skip
        yield service


def cards(service: Served, modality: str = "image") -> dict[str, dict[str, Any]]:
    found = {model["id"]: model["diptych"] for model in service.json("/v1/models")["data"]}
    return {name: card for name, card in found.items() if card["modality"] == modality}


def having(service: Served, modality: str, state: str) -> set[str]:
    return {name for name, card in cards(service, modality).items() if card[state]}


def test_an_added_inpainting_model_serves_edits_with_a_mask_alone(service: Served) -> None:
    """It is the first, and so the default."""
    assert cards(service)["painter"]["inpaint_only"] is True

    side = SHAPE.native
    image = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    mask = np.full((side, side, 4), 255, dtype=np.uint8)
    mask[: side // 2, :, 3] = 0
    fields = {"prompt": "a fox", "seed": 7, "response_format": "b64_json"}
    edit = {**fields, "images": [as_url(image)]}
    for path, asked, wrong in ("/v1/images/generations", fields, "model"), ("/v1/images/edits", edit, "mask"):
        status, body = service.call(path, asked)
        assert status == 400 and json.loads(body)["error"]["param"] == wrong, body
    Image.fromarray(image).save(service.folder / "cat.png")
    Image.fromarray(mask).save(service.folder / "mask.png")
    (command,) = re.findall(r"curl .*", service.out)
    subprocess.run(command, shell=True, cwd=service.folder, check=True, timeout=60)
    with Image.open(service.folder / "hat.png") as hat:
        assert hat.size == (side, side)
    data = service.json("/v1/images/edits", {**edit, "mask": as_url(mask)})["data"]
    drawn = np.asarray(Image.open(io.BytesIO(base64.b64decode(data[0]["b64_json"]))))
    assert (drawn[side // 2 :] == image[side // 2 :]).all() and (drawn[: side // 2] != image[: side // 2]).mean() > 0.5


def drawn(service: Served, seed: int = 1, **fields: object) -> bytes:
    given = {"prompt": "a cat", "seed": seed, "steps": 2, "deterministic": True, "response_format": "b64_json"}
    return base64.b64decode(service.json("/v1/images/generations", given | fields)["data"][0]["b64_json"])


def test_four_models_are_served_by_one_worker_which_has_room_for_two(service: Served) -> None:
    """Fine-tunes asked for at once, then one after the other."""
    wait_until(lambda: having(service, "image", "live") == {"painter", *TUNED}, "all models")
    with ThreadPoolExecutor(6) as pool:
        pictures = list(pool.map(lambda at: drawn(service, model=TUNED[at % 3], seed=at // 3), range(6)))
    assert len({*pictures}) == 6
    for at in (2, 1, 3):
        assert drawn(service, model=TUNED[at % 3], seed=at // 3) == pictures[at]

    def announced() -> bool:
        tuned = having(service, "image", "loaded") & {*TUNED}
        return "one" in tuned and len(tuned) <= 2

    wait_until(announced, "what was evicted, and what was drawn with last")
    assert service.call("/v1/images/generations", {"prompt": "a cat", "model": "five"})[0] == 404


@cache
def own_answers(folder: Path) -> dict[tuple[str, int], str]:
    answers = {}
    for name in TEXTS:
        model = load(str(EMBEDDED_TEXT_MODEL if name == TEXTS[0] else folder / "store" / name))
        with serving(model) as (engine, _):
            given = [TextParameters(chat(model, PROMPT), 24, temperature=1.0, seed=seed) for seed in range(2)]
            texts = [engine.submit(Request(str(at), "text", each)) for at, each in enumerate(given)]
            answers |= {(name, seed): future.result(60).text for seed, future in enumerate(texts)}
    return answers


def body(model: str, seed: int, **fields: object) -> dict[str, object]:
    return {
        "model": model, "messages": [{"role": "user", "content": PROMPT}], "seed": seed, "temperature": 1.0,
        "max_tokens": 24, **fields,
    }  # fmt: skip


def answered(service: Served, model: str, seed: int) -> str:
    status, data = service.call("/v1/chat/completions", body(model, seed, stream=True))
    assert status == 200, data
    events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
    assert {event["model"] for event in events} == {model}
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def test_three_text_models_stream_at_once_as_each_does_alone_in_the_memory_of_two(service: Served) -> None:
    """One of them leaves memory for another, and comes back."""
    wait_until(lambda: having(service, "text", "live") == {*TEXTS}, "all")
    expected = own_answers(service.folder.parent)
    with ThreadPoolExecutor(6) as pool:
        streams = {key: pool.submit(answered, service, *key) for key in expected}
        assert {key: stream.result() for key, stream in streams.items()} == expected
    for name in ("scribe", "poet"):
        assert answered(service, name, 0) == expected[name, 0]
        both = {TEXTS[0], name}
        wait_until(lambda both=both: having(service, "text", "loaded") == both, f"{name} alone beside the first")
    loaded = cards(service, "text")
    assert [loaded[name]["loaded_workers"] for name in TEXTS] == [1, 1, 0] and loaded["scribe"]["workers"] == 1
    assert loaded["scribe"]["load_s"] > 0 and all(card["device"] == "cpu" for card in loaded.values())


def test_a_text_request_without_a_model_means_the_first_which_expands_prompts_too(service: Served) -> None:
    expected = own_answers(service.folder.parent)
    first = service.json("/v1/chat/completions", {**body(TEXTS[0], 0), "model": None})
    assert (first["model"], first["choices"][0]["message"]["content"]) == (TEXTS[0], expected[TEXTS[0], 0])
    asked = {"prompt": PROMPT, "expand_prompt": True, "model": "one", "steps": 1, "seed": 1, "response_format": "url"}
    assert service.json("/v1/images/generations", asked)["data"][0]["revised_prompt"] != PROMPT


def test_chat_asks_a_service_for_the_model_that_it_names(service: Served, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["chat", "--url", service.url, "--text-model", "poet", "--seed", "1", "--temperature", "1", PROMPT]
    assert cli.main([*words, "--max-tokens", "24"]) == 0
    assert capsys.readouterr().out.strip() == own_answers(service.folder.parent)["poet", 1].strip()


def test_a_damaged_text_model_fails_its_own_requests_alone(service: Served) -> None:
    expected = own_answers(service.folder.parent)
    assert answered(service, "poet", 0) == expected["poet", 0]  # for which the scribe left memory
    weights = service.folder.parent / "store" / "scribe" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with ThreadPoolExecutor(3) as pool:
        others = {(name, 1): pool.submit(answered, service, name, 1) for name in TEXTS[:2]}
        status, data = pool.submit(service.call, "/v1/chat/completions", body("scribe", 0)).result()
        assert (status, json.loads(data)["error"]["code"]) == (500, "engine_error"), data
        assert {key: stream.result() for key, stream in others.items()} == {key: expected[key] for key in others}

"""What a text model is computed in where nobody says: for each device, from what it can do and what the model has."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm.checkpoints import load as loading
from llm.checkpoints.int4_checkpoint import Published
from llm.checkpoints.precision import choose, load
from llm.checkpoints.quantized import make
from llm.families import tiny

HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)


@pytest.mark.parametrize(
    ("variants", "capability", "lacks", "wanted", "said"),
    [
        ((), None, None, "fp32", "no variant in 8 bits"),
        (("int8",), None, None, "int8", "model-int8"),
        (("int8",), None, "no compiler", "fp32", "no compiler, so its model-int8 is of no use"),
        (("fp8",), None, None, "fp32", "this device does not multiply fp8"),
        (("fp8", "int8"), None, None, "int8", "model-int8"),
        ((), HOPPER, None, "bf16", "no variant in 8 bits"),
        (("int8",), HOPPER, None, "int8", "model-int8"),
        (("fp8",), HOPPER, None, "fp8", "model-fp8"),
        (("fp8", "int8"), HOPPER, None, "int8", "model-int8"),
        (("fp8", "int8"), HOPPER, "triton is not installed", "bf16", "triton is not installed"),
        (("fp8",), AMPERE, None, "bf16", "this device does not multiply fp8"),
        (("fp8",), (8, 9), None, "fp8", "model-fp8"),
        (("int8",), AMPERE, None, "int8", "model-int8"),
        (("w4a16",), HOPPER, None, "w4a16", "model-w4a16"),
        (("w4a16", "int8"), HOPPER, None, "int8", "model-int8"),
        (("w4a16",), None, None, "fp32", "this device does not multiply w4a16"),
        ((), TURING, None, "fp32", "compute capability 7.5 has no bf16"),
    ],
)
def test_the_choice_follows_from_device_and_variants(
    variants: tuple[str, ...], capability: tuple[int, int] | None, lacks: str | None, wanted: str, said: str
) -> None:
    precision, reason = choose(variants, capability=capability, lacks=lacks)
    assert precision == wanted and said in reason


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its INT8 variant."""
    folder = tiny.save(tmp_path_factory.mktemp("models") / "small", tiny.SHAPES[tiny.TINY])
    make(loading.load(str(folder)), [(1, 7, 8, 9)], folder)
    return folder


def test_on_a_cpu_a_variant_is_taken_where_the_kernels_run(model: Path) -> None:
    for lacks, wanted in ((None, "int8"), ("no compiler", "fp32")):
        found, reason = load(str(model), "auto", device="cpu", lacks=lacks)
        assert found.precision == wanted and reason
    found, _ = load(tiny.TINY, "auto", device="cpu", lacks=None)
    assert found.precision == "fp32"


def test_what_is_asked_for_is_what_is_loaded(model: Path) -> None:
    for asked in ("fp32", "bf16", "int8"):
        assert load(str(model), asked, device="cpu", lacks="no compiler")[0].precision == asked


def test_a_variant_of_a_model_that_the_kernels_do_not_know_is_left_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llm.families.family.MODEL_TYPES", ("mistral",))
    found, reason = load(str(model), "auto", device="cpu", lacks=None)
    assert found.precision == "fp32" and "the native kernels support mistral, not llama" in reason


def test_a_model_that_is_published_in_4_bits_is_refused_where_gpus_have_no_bf16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llm.checkpoints.load.published", lambda name: Published("awq", "w4a16"))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: TURING)
    with pytest.raises(loading.TextModelError, match=r"in 4 bits \(awq\), which compute capability 7\.5 does not"):
        load("owner/name", "auto", device="cuda", lacks=None)


def test_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(loading.TextModelError, match="no such folder"):
        load("nowhere", "auto", device="cpu", lacks=None)

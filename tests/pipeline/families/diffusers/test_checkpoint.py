"""Which models run by diffusers' own loop, how they load, and what is refused with its reason."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from pipeline.checkpoints.folder import ModelError
from pipeline.families import diffusers
from pipeline.families.diffusers import checkpoint
from tests.pipeline.damage import edit
from tests.pipeline.families.diffusers.conftest import Folders
from tests.pipeline.families.diffusers.pipelines import cached

MODELS = Path(__file__).parents[4] / "models"


def copied(folder: Path, where: Path, **index: object) -> Path:
    """A copy of a pipeline whose index says this."""
    copy = Path(shutil.copytree(folder, where / "copy"))
    edit("model_index.json", **index)(copy)
    return copy


def refused(folder: Path, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        checkpoint.load(str(folder), precision="fp32", device="cpu")


def test_pipelines_without_a_native_family_are_found(folders: Folders, tmp_path: Path) -> None:
    assert diffusers.find(str(folders("flux"))) == folders("flux")
    assert diffusers.find("random:tiny") is None
    for name in ("emoji-xl", "emoji-z"):
        if (MODELS / name / "model_index.json").is_file():
            assert diffusers.find(str(MODELS / name)) is None
    for class_name in ("NoSuchPipeline", "AutoencoderKL", ["pipeline", "Remote"]):
        (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": class_name}))
        assert diffusers.find(str(tmp_path)) is None
    with pytest.raises(ModelError, match="no such folder"):
        diffusers.find("/nowhere")


def test_weights_have_the_precision_that_is_asked_for(folders: Folders) -> None:
    for precision, dtype in (("auto", torch.float32), ("bf16", torch.bfloat16)):
        model = checkpoint.load(str(folders("lumina2")), precision=precision, device="cpu")
        assert {parameter.dtype for parameter in model.modules["transformer"].parameters()} == {dtype}
        assert model.precision == ("fp32" if precision == "auto" else precision)
    assert model.weight_bytes > sum(p.nbytes for p in model.modules["transformer"].parameters())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "nf4"}, "bitsandbytes|does not run on a CPU"),
        ({"precision": "fp8"}, "torchao|does not run on a CPU"),
        ({"offload": "model"}, "offload: model"),
        ({"weights": "/nowhere/flux.gguf"}, "gguf|GGUF"),
        ({"device": "cuda:99"}, "does not load|cuda"),
    ],
)
def test_what_does_not_run_here_is_refused_with_its_reason(
    options: dict[str, str], words: str, folders: Folders
) -> None:
    with pytest.raises(ModelError, match=words):
        checkpoint.load(str(folders("flux")), **{"precision": "auto", "device": "cpu", **options})


@pytest.mark.skipif(find_spec("torchao") is not None, reason="torchao is installed")
def test_a_missing_package_is_named(folders: Folders) -> None:
    with pytest.raises(ModelError, match="pip install torchao"):
        checkpoint.load(str(folders("flux")), precision="int8", device="cpu")


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_package_that_a_part_needs_is_named(folders: Folders, tmp_path: Path) -> None:
    processor = ["transformers", "Qwen2VLProcessor"]
    folder = copied(folders("qwen_image"), tmp_path, _class_name="QwenImageEditPlusPipeline", processor=processor)
    shutil.copytree(folder / "tokenizer", folder / "processor")
    pictures = {"image_processor_type": "Qwen2VLImageProcessor"}
    (folder / "processor" / "preprocessor_config.json").write_text(json.dumps(pictures))
    refused(folder, r"needs the package torchvision: .* in the release for torch 2\.")


def test_an_id_of_the_hub_is_read_from_its_cache(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network; the same model as its folder."""
    kept = cached(folders("lumina2"), "tests/lumina", tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert diffusers.find("tests/lumina") == kept
    one, other = (
        checkpoint.load(name, precision="fp32", device="cpu") for name in ("tests/lumina", str(folders("lumina2")))
    )
    assert one.digest == other.digest
    with pytest.raises(ModelError, match="its cache does not hold it"):
        diffusers.find("tests/another")
    (kept / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ModelError, match="tests/lumina: does not load"):
        checkpoint.load("tests/lumina", precision="fp32", device="cpu")


def test_a_class_that_changes_shared_networks_is_refused(folders: Folders, tmp_path: Path) -> None:
    folder = copied(folders("pixart_sigma"), tmp_path, _class_name="PixArtSigmaPAGPipeline")
    refused(folder, "PixArtSigmaPAGPipeline, which changes its networks during a call")


def test_damaged_and_pickled_weights_are_refused(folders: Folders, tmp_path: Path) -> None:
    folder = copied(folders("lumina2"), tmp_path)
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(b"no tensors")
    refused(folder, "does not load")
    weights.write_bytes(whole)
    weights.rename(weights.with_suffix(".bin"))
    refused(folder, "does not load")


@pytest.mark.skipif(find_spec("sentencepiece") is not None, reason="sentencepiece is installed")
def test_a_package_that_a_class_needs_is_named(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "KolorsPipeline"}))
    refused(tmp_path, "a KolorsPipeline needs packages: pip install sentencepiece")


@pytest.mark.parametrize(
    ("file", "index"),
    [
        ("vae/mine.py", {"vae": ["mine", "Mine"]}),
        ("mine.py", {"_class_name": ["mine", "Mine"]}),
        ("None.py", {}),  # diffusers looks for a file of its argument's name, which is None
    ],
)
def test_code_that_comes_with_a_folder_never_runs(
    file: str, index: dict[str, object], folders: Folders, tmp_path: Path
) -> None:
    folder = copied(folders("lumina2"), tmp_path, **index)
    (folder / file).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: ...\n")
    refused(folder, r"custom code in \w+\.py|is no pipeline of diffusers")
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # of torch.compile itself
@pytest.mark.parametrize("name", ["flux", "lumina2"])  # with a list of repeated blocks, and without one
def test_every_denoisers_blocks_are_compiled(folders: Folders, name: str) -> None:
    model = checkpoint.load(str(folders(name)), precision="auto", device="cpu")
    checkpoint._compile(model)
    compiled = {type(part).__name__ for part in model.modules["transformer"].modules() if part._compiled_call_impl}
    assert compiled and all("Block" in block for block in compiled)

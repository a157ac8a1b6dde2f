"""Requests with LoRAs of their own: as diffusers draws them, as fused weights do, and the same in any company."""

from __future__ import annotations

import ctypes
import functools
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from contract.errors import Invalid
from contract.image import Edit, ImageParameters
from contract.plan import AUTO, DeepCache
from core.batching.request import State
from pipeline.backends.phases import STEPS
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import load
from pipeline.extensions import lora
from pipeline.extensions.costs import left
from pipeline.quantization import quantized
from tests.core.tape import Tape
from tests.pipeline import loras
from tests.pipeline.worlds import Crank, Watching, apart, levels, options_of, psnr, solo, stock_options

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
PLAIN = ImageParameters("a red cat", 1, 32, 32, steps=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LoRAs of all sorts: of all parts, of keys and values alone, of text encoders alone."""
    folder = tmp_path_factory.mktemp("loras")
    model = load(tiny.TINY)
    loras.write(model, folder, "a")
    loras.write(model, folder, "b", 1, rank=3, layout="sgm", alpha=2.0)
    attn2 = f"{loras.ATTENTION}.attn2"
    loras.write(model, folder, "keys", 2, layers={"unet": (f"{attn2}.to_k", f"{attn2}.to_v")}, loud=1.0)
    loras.write(model, folder, "text", 3, layers={"text_encoder": loras.TEXT, "text_encoder_2": loras.TEXT}, loud=1.0)
    return folder


def runner_of(folder: Path | None, name: str = tiny.TINY, **options: Any) -> Watching:
    return Watching(load(name), loras=folder, **options)


@pytest.fixture(scope="module")
def runner(folder: Path) -> Iterator[Watching]:
    """On torch."""
    made = runner_of(folder)
    yield made
    made.close()


def with_lora(text: str, **more: Any) -> ImageParameters:
    return replace(PLAIN, lora=text, **more)


@functools.cache
def stock_picture(folder: Path, *named: tuple[str, float]) -> np.ndarray:
    """What diffusers draws with these, by way of peft and without adding them to weights."""
    pytest.importorskip("peft")
    stock = tiny.make(tiny.SHAPES[tiny.TINY])
    stock.set_progress_bar_config(disable=True)
    for name, _ in named:
        stock.load_lora_weights(str(folder), weight_name=f"{name}.safetensors", adapter_name=f"lora_{name}")
    stock.set_adapters([f"lora_{name}" for name, _ in named], [scale for _, scale in named])
    return np.asarray(stock(**stock_options(PLAIN)).images[0]).astype(int)


@pytest.mark.quick(
    *(f"torch-{text}" for text in ("a:-0.5,b:0.8", "keys", "text:2")),
    *(f"kernels-{text}" for text in ("a:-0.5,b:0.8", "b", "text:2")),
)
@pytest.mark.parametrize("text", ["a:0.7", "b", "a:-0.5,b:0.8", "keys", "text:2"])
@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_a_picture_equals_diffusers_and_fused_weights(
    folder: Path, kernels: ctypes.CDLL, backend: str, text: str
) -> None:
    options, named = options_of(backend, kernels), lora.find(text, str(folder))
    runner = runner_of(folder, **options)
    drawn = solo(runner, with_lora(text))
    expected = stock_picture(folder, *((one.name, one.scale) for one in named))
    assert apart(drawn, expected) <= 1
    fused = solo(Watching(load(tiny.TINY, loras=named), **options), PLAIN)
    assert apart(fused, expected) <= 1 and apart(fused, drawn) <= 1
    assert apart(drawn, solo(runner, PLAIN)) > 3, "it would prove nothing"


def test_on_the_cpu_kernels_whole_weights_are_drawn_and_dora_needs_them(tmp_path: Path, kernels: ctypes.CDLL) -> None:
    plain, generator = load(tiny.TINY), torch.Generator().manual_seed(9)
    differences, dora = dict[str, torch.Tensor](), {"unet": dict[str, torch.Tensor](), "text": {}}
    layers = {"unet": loras.UNET[:6], "text_encoder": loras.TEXT[:2]}
    for (part, name), (down, up) in loras.matrices(plain, 4, layers=layers).items():
        weight = loras.layer(plain, part, name).weight.detach()
        differences[f"{part}.{name}.diff"] = 0.1 * weight.std() * torch.randn(weight.shape, generator=generator)
        size = weight.norm(dim=1) * (1 + 0.2 * torch.rand(len(weight), generator=generator))
        dora[part.removesuffix("_encoder")] |= {
            f"{part}.{name}.lora_A.weight": down, f"{part}.{name}.lora_B.weight": up,
            f"{part}.{name}.lora_magnitude_vector": size,
        }  # fmt: skip
    for file, tensors in {"full": differences, **dora}.items():
        save_file(tensors, tmp_path / f"{file}.safetensors")
    served, on_torch = runner_of(tmp_path, kernels=kernels, release=("unet", "vae")), runner_of(tmp_path)
    wanted = {"full": with_lora("full"), "text": with_lora("text", seed=2), "none": replace(PLAIN, seed=3)}
    together = mixed(served, wanted)
    for name, one in wanted.items():
        assert together[name].png() == solo(served, one).png(), name
        assert apart(together[name], solo(on_torch, one)) <= 1, name
    assert apart(solo(on_torch, with_lora("unet")), solo(on_torch, PLAIN)) > 3, "on torch it is drawn"
    needed = r"lora_magnitude_vector' is DoRA, which needs the layer's own weights, .*DIPTYCH_LORA"
    with pytest.raises(Invalid, match=needed):
        solo(served, with_lora("unet"))


def companions() -> dict[str, ImageParameters]:
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8).tobytes()
    return {
        "one": with_lora("a"),
        "other-scale": with_lora("a:0.3", seed=2),
        "other": with_lora("b", prompt="a blue hat", seed=3),
        "both": with_lora("b:0.5,a:-1", seed=4),
        "none": replace(PLAIN, seed=5),
        "none-cached": replace(PLAIN, seed=6, deepcache=AUTO),
        "cached": with_lora("b", seed=7, steps=6, deepcache=DeepCache(2, "block")),
        "cached-resnet": with_lora("a:0.5", seed=8, steps=6, deepcache=AUTO),
        "unguided": with_lora("a", seed=9, guidance_scale=1.0),
        "keys": with_lora("keys", seed=10, guidance_scale=1.0, scheduler="euler-ancestral"),
        "edit": with_lora("b", seed=11, edit=Edit(noise, None, 0.8)),
        "weighted": with_lora("a", prompt="a (red)1.4 cat--", prompt_weighting=True, seed=12),
    }


@pytest.fixture(scope="module")
def on_torch(runner: Watching) -> dict[str, Any]:
    """Each of them alone."""
    return {name: solo(runner, one) for name, one in companions().items()}


def mixed(runner: Watching, wanted: dict[str, ImageParameters], late: int = 2) -> dict[str, Any]:
    """All drawn together; every other one comes some iterations later."""
    crank = Crank(runner)
    for name, one in list(wanted.items())[::2]:
        crank.submit(name, one)
    for _ in range(late):
        crank.turn()
    for name, one in list(wanted.items())[1::2]:
        crank.submit(name, one)
    return crank.pictures()


def test_companions_change_nothing_and_all_loras_share_forwards(runner: Watching, on_torch: dict[str, Any]) -> None:
    wanted = companions()
    runner.rides.clear()
    together = mixed(runner, wanted)
    rides = runner.companions
    assert any({"one", "other", "unguided"} <= ride for ride in rides), rides
    assert not any(bool({"none", "none-cached"} & ride) and len(ride - {"none", "none-cached"}) for ride in rides)
    for name, alone in on_torch.items():
        assert apart(together[name], alone) <= 1, name


def test_deterministic_requests_are_equal_to_the_byte(folder: Path, runner: Watching) -> None:
    wanted = {name: replace(one, deterministic=True) for name, one in companions().items()}
    together, again = mixed(runner, wanted), runner_of(folder)
    for name in ("one", "both", "cached", "unguided", "edit", "weighted"):
        alone = solo(again, wanted[name])
        assert together[name].png() == alone.png(), name


def test_on_the_cpu_kernels_all_share_forwards_and_none_changes_another(
    folder: Path, kernels: ctypes.CDLL, on_torch: dict[str, Any]
) -> None:
    """Requests with LoRAs and without: bit for bit as alone, as torch draws them, on weights that are packed only."""
    wanted = companions()
    without = runner_of(None, kernels=kernels, frugal=True)
    served = Watching(load(tiny.TINY), loras=folder, kernels=kernels, release=("unet", "vae"))
    together = mixed(served, wanted)
    rides = served.companions
    plain = {name for name, one in wanted.items() if not one.lora}
    assert any(ride & plain and ride - plain for ride in rides), rides
    assert any({"one", "other", "both", "unguided"} <= ride for ride in rides), rides
    for name, one in wanted.items():
        assert together[name].fingerprint["executable"] == "kernels"
        assert together[name].png() == solo(served, one).png(), name
        if one.lora:
            assert apart(together[name], on_torch[name]) <= 1, name
        else:
            assert together[name].png() == solo(without, one).png(), name


def test_on_fused_layers_too(folder: Path, on_torch: dict[str, Any]) -> None:
    """Beside all others, also by the graphs of their own that their first steps have asked for."""
    wanted = companions()
    without = runner_of(None, fused=True)
    expected = {name: on_torch[name] if one.lora else solo(without, one) for name, one in wanted.items()}
    served = runner_of(folder, fused=True, recorder=Tape())
    first = mixed(served, wanted)
    plain = {name for name, one in wanted.items() if not one.lora}
    assert any(ride & plain and ride - plain for ride in served.companions), served.companions
    assert served.recording.wait(600)
    graphs = served.backend.graphs._graphs
    own = {phase for phase, (_, _, _, variant) in graphs._known if variant is not None}  # type: ignore[misc]
    assert own == {"deep", "shallow", "shallow-resnet"}
    before = {key: graph._replay for key, graph in graphs._known.items()}
    second = mixed(served, wanted)
    assert before.items() <= {key: graph._replay for key, graph in graphs._known.items()}.items()
    for name, reference in expected.items():
        assert apart(first[name], reference) <= 1 and apart(second[name], reference) <= 1, name
    assert apart(solo(served, wanted["none"]), expected["none"]) == 0


def test_what_loras_add_to_recorded_steps_is_measured_apart(folder: Path, kernels: ctypes.CDLL) -> None:
    """Plain steps have graphs without, whose costs say nothing of it; programs have one cost for all."""
    size = (PLAIN.width, PLAIN.height)
    recording, programs = runner_of(folder, fused=True, recorder=Tape()), runner_of(folder, kernels=kernels)
    recording.recording.close()
    added = {(("lora", phase), size, False) for phase in ("deep", "shallow")}
    for runner, apart_ in ((recording, True), (programs, False)):
        crank, left_s = Crank(runner), []
        request = crank.submit("it", with_lora("a", deepcache=DeepCache(2, "block")))
        while crank.turn():
            if request.work is not None and request.phase in STEPS:
                left_s.append(left(runner.steps.values(), runner.backend, size, request.work))
        measured = runner.backend.costs.measured().keys()
        assert (("deep", size, False) in measured) is not apart_
        assert (added <= measured) is apart_ and (apart_ or not added & measured)
        assert all(seconds > 0 for seconds in left_s) is apart_ and len(left_s) == PLAIN.steps
    recording.close()


def test_the_file_says_what_was_added(folder: Path, runner: Watching) -> None:
    picture = solo(runner, with_lora("a:0.5,b"))
    text = Image.open(io.BytesIO(picture.png())).text  # type: ignore[attr-defined]
    told = {name: json.loads(text[name]) for name in ("diptych", "fingerprint")}
    assert told["diptych"]["lora"] == "a:0.5,b" and "<lora:a:0.5> <lora:b:1>\n" in text["parameters"]
    assert {name: len(digest) for name, digest in told["fingerprint"]["lora"].items()} == {"a": 64, "b": 64}
    plain = solo(runner, PLAIN)
    assert "lora" not in plain.parameters.to_dict() and "lora" not in plain.fingerprint


def test_prompts_are_remembered_for_each_lora_and_scale(runner: Watching) -> None:
    crossed = [solo(runner, with_lora(text, prompt="a new hat")) for text in ("text", "text:0.5", "text", "text:0.5")]
    assert apart(crossed[0], crossed[2]) == 0 == apart(crossed[1], crossed[3])
    assert apart(crossed[0], crossed[1]) > 1
    assert apart(crossed[0], solo(runner, replace(PLAIN, prompt="a new hat"))) > 1


def test_weights_are_neither_copied_nor_changed(folder: Path) -> None:
    runner = runner_of(folder)
    own, twin = runner.model.denoiser, runner._backends["lora"].model.denoiser
    shared = dict(twin.named_parameters())
    assert all(shared[name] is parameter for name, parameter in own.named_parameters())
    before = {name: value.clone() for name, value in own.state_dict().items()}
    plain = solo(runner, PLAIN)
    solo(runner, with_lora("a,b"))
    assert all(torch.equal(before[name], value) for name, value in own.state_dict().items())
    assert not any(module._forward_hooks for module in own.modules()), "others' forwards meet none of it"
    assert apart(solo(runner, with_lora("a:0")), plain) == 0, "with no LoRA it is the model"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("a,gone:0.5", "lora: gone: there is no gone.safetensors in the LoRA folder"),
        ("../a", "lora: a name "),
        ("a:nan", "lora: a: its scale must be a number"),
        (" , ", "lora: must name one"),
    ],
)
def test_what_cannot_be_is_refused_by_name(runner: Watching, text: str, wrong: str) -> None:
    with pytest.raises(Invalid, match=f"^{wrong}"):
        Crank(runner).submit("x", with_lora(text))


@pytest.fixture(scope="module")
def in_int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    saved = tiny.save(tmp_path_factory.mktemp("int8") / "tiny", tiny.SHAPES[tiny.TINY])
    quantized.make(load(str(saved)), ["a hat"], saved)
    return saved


@pytest.mark.quick("kernels")
@pytest.mark.parametrize("backend", ["kernels", "layers"])
def test_in_int8_they_are_drawn_beside_all_others(
    backend: str, folder: Path, kernels: ctypes.CDLL, in_int8: Path
) -> None:
    """As near to fp32 as INT8 without any is; on the kernels bit for bit as alone, and others as without a folder."""
    wanted = {name: one for name, one in companions().items() if name != "edit"}
    options = options_of(backend, kernels) | ({"release": ("unet", "vae")} if backend == "kernels" else {})

    def runner(precision: str, loras: Path | None) -> Watching:
        return Watching(load(str(in_int8), precision=precision), loras=loras, **options)

    served, without, exact = runner("int8", folder), runner("int8", None), runner("fp32", folder)
    together = mixed(served, wanted)
    floats = {name: solo(exact, one) for name, one in wanted.items()}
    unadapted = {name: solo(without, one) for name, one in wanted.items() if not one.lora}
    least = min(psnr(picture, floats[name]) for name, picture in unadapted.items())
    for name, one in wanted.items():
        assert psnr(together[name], floats[name]) > least - 6, name
        if backend == "kernels":
            alone = solo(served, one)
            assert together[name].png() == alone.png() == unadapted.get(name, alone).png(), name
    with_it, plain = (psnr(together["one"], solo(exact, replace(wanted["one"], lora=lora))) for lora in ("a", ""))
    assert plain < with_it - 3, "it would prove nothing"
    fixed = {name: replace(one, deterministic=True) for name, one in wanted.items()}
    together, again = mixed(served, fixed), runner("int8", folder)
    for name in ("one", "both", "cached", "none"):
        assert together[name].png() == solo(again if fixed[name].lora else without, fixed[name]).png(), name
    assert together["one"].fingerprint["executable"] == backend


def test_without_a_folder_there_are_none_nor_where_torch_emulates_eight_bits(folder: Path, in_int8: Path) -> None:
    with pytest.raises(Invalid, match=r"^lora: no LoRA folder is configured"):
        Crank(runner_of(None)).submit("x", with_lora("a"))
    runner = Watching(load(str(in_int8), precision="int8"), loras=folder)
    assert runner.folder("lora") is None
    with pytest.raises(Invalid, match=r"^lora: weights in int8 take none on cpu"):
        Crank(runner).submit("x", with_lora("a"))


def test_a_file_that_goes_bad_fails_its_own_request_alone(tmp_path: Path) -> None:
    model = load(tiny.TINY)
    for name in ("good", "bad", "gone"):
        loras.write(model, tmp_path, name)
    nan = {key: tensor.fill_(torch.nan) for key, tensor in load_file(loras.write(model, tmp_path, "nan")).items()}
    save_file(nan, tmp_path / "nan.safetensors")
    runner = Watching(model, loras=tmp_path)
    crank = Crank(runner)
    with pytest.raises(Invalid, match=r"^lora: nan: .* holds what is no finite number"):
        crank.submit("nan", with_lora("nan"))
    for name in ("good", "bad", "gone"):
        crank.submit(name, with_lora(name))
    for file in runner.folder("lora").cache._files.values():  # as when others needed the room
        file.content = None
    (tmp_path / "bad.safetensors").write_bytes(b"none")
    (tmp_path / "gone.safetensors").unlink()
    ended = crank.run()
    for name in ("bad", "gone"):
        error = ended[name].error
        assert isinstance(error, Invalid) and str(error).startswith(f"lora: {name}: "), name
    assert apart(ended["good"].result, solo(runner, with_lora("good"))) <= 1


def test_in_bf16_it_is_as_near_to_fused_weights_as_bf16_is(folder: Path) -> None:
    model = load(tiny.TINY, precision="bf16")
    own = Watching(model, loras=folder)
    fused = Watching(load(tiny.TINY, precision="bf16", loras=lora.find("a", str(folder))))
    whole = Watching(load(tiny.TINY, loras=lora.find("a", str(folder))))
    drawn, rounded, exact, plain = (
        levels(solo(runner, wanted)).astype(float)
        for runner, wanted in ((own, with_lora("a")), (fused, PLAIN), (whole, PLAIN), (own, PLAIN))
    )
    off = abs(rounded - exact).mean()
    assert abs(drawn - exact).mean() < 2 * off + 1 < abs(plain - exact).mean()


def test_a_lora_that_breaks_the_model_fails_its_own_request_and_says_so(folder: Path) -> None:
    model = load(tiny.TINY, precision="fp16")
    half = Watching(model, loras=folder)
    crank = Crank(half)
    for name, text in (("broken", "b:100,a:100"), ("whole", "a:0.5")):
        crank.submit(name, with_lora(text))
    ended = crank.run()
    assert ended["whole"].state is State.DONE
    error = ended["broken"].error
    assert isinstance(error, Invalid) and str(error).startswith("lora: with it the fp16 UNet")

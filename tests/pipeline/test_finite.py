"""A network that returns NaN or infinity fails its request by its name, or is decoded again in fp32; companions do not
notice.
"""

from __future__ import annotations

import copy
import ctypes
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from contract.errors import Invalid
from contract.image import Edit, ImageParameters
from contract.refining import Refining
from contract.upscale import Upscale
from core.batching.request import Request, State
from core.failures import NotFinite
from pipeline.checkpoints.load import ImageModel, load
from pipeline.checkpoints.tiny import SDXLShape
from pipeline.extensions.depth import DepthEstimator
from pipeline.extensions.esrgan import Shape
from pipeline.extensions.upscaling import UpscalerFolder
from pipeline.families.family import TinyVae
from pipeline.finite import all_finite, finite_rows
from pipeline.pixels import vae
from tests.pipeline import controls, depths, ip_adapters, refiners, upscalers, worlds
from tests.pipeline.pixels.test_edit import photograph
from tests.pipeline.worlds import Crank, Watching, apart, levels, model, options_of, solo, tiny_model
from tests.unet_opt.shapes import tiny_vae

SHAPE = "finite"
HUGE = 1e30  # finite in fp32, and its square is not
BACKENDS = ("torch", "kernels", "layers", "graphs")


@pytest.fixture(scope="module", autouse=True)
def shapes() -> None:
    worlds.MORE[SHAPE] = SDXLShape(channels=(16, 32), heads=(1, 2))


def wanted(**options: Any) -> ImageParameters:
    given = {"prompt": "a red cat", "seed": 1, "width": 32, "height": 32, "steps": 3, "deterministic": True, **options}
    return ImageParameters(**given)


def changed(part: Any, change: Callable[[Any], None]) -> Any:
    """A copy of a module with other weights."""
    part = copy.deepcopy(part)
    with torch.no_grad():
        change(part)
    return part


def scaled(parameter: Tensor, factor: float) -> None:
    parameter.mul_(factor)


def failed(runner: Watching, broken: ImageParameters, *companions: ImageParameters) -> Request:
    """The request that fails, whose companions' pictures are theirs alone to the bit."""
    crank = Crank(runner)
    request = crank.submit("broken", broken)
    for index, companion in enumerate(companions):
        crank.submit(str(index), companion)
    crank.run()
    assert request.state is State.FAILED and request.work is None
    for index, companion in enumerate(companions):
        assert (levels(crank.ended[str(index)].result) == levels(solo(runner, companion))).all()
    return request


def overflows(
    runner: Watching, parameters: list[ImageParameters], spoil: Callable[[Tensor], None]
) -> dict[str, Request]:
    """Draw all; the latents of the first one are spoiled when all its steps are done."""
    crank = Crank(runner)
    requests = [crank.submit(str(index), one) for index, one in enumerate(parameters)]
    while requests[0].work is None or requests[0].work.trajectory is None or requests[0].work.trajectory.left:
        crank.turn()
    with torch.inference_mode():
        spoil(requests[0].work.trajectory.x)
    return crank.run()


# -- decoders ----------------------------------------------------------------------------------------------------------


@pytest.mark.quick("torch", "kernels", "graphs")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_picture_that_the_vae_cannot_decode_fails_alone(backend: str, kernels: ctypes.CDLL) -> None:
    runner = Watching(model(SHAPE), **options_of(backend, kernels))
    parameters = [wanted(seed=seed, deterministic=False) for seed in range(3)]
    sound = overflows(runner, parameters, lambda x: None)
    for count in (1, 3):
        ended = overflows(runner, parameters[:count], lambda x: scaled(x, HUGE))
        assert isinstance(ended["0"].error, NotFinite)
        assert str(ended["0"].error) == f"the fp32 VAE of {model(SHAPE).name} returned NaN or infinity"
        for index in range(1, count):
            assert (levels(ended[str(index)].result) == levels(sound[str(index)].result)).all()
    assert any(len(ride) == 3 for phase, ride in runner.rides if phase == "vae"), "they were not decoded together"


@pytest.mark.parametrize("corner", [0, -1])
def test_a_tile_that_cannot_be_decoded_fails_the_picture(corner: int) -> None:
    one = replace(model(SHAPE), tiled_above=16 * 16)
    picture = wanted(width=64, height=24)

    def spoil(x: Tensor) -> None:
        x[..., corner, corner] = HUGE

    assert isinstance(overflows(Watching(one), [picture], spoil)["0"].error, NotFinite)


def test_a_tiny_decoder_that_overflows_is_named() -> None:
    plain = model(SHAPE)
    network = tiny_vae(8, (1,) * len(plain.vae.config.block_out_channels), plain.latent_channels)
    network = changed(network, lambda net: scaled(net.decoder.layers[0].weight, 3e38))
    runner = Watching(replace(plain, tiny_vae=TinyVae(network, "0")))
    request = failed(runner, wanted(vae="tiny"), wanted(seed=2))
    assert str(request.error) == f"the fp32 tiny VAE of {plain.name} returned NaN or infinity"


def in_half(scale: float, tiny: bool = False) -> ImageModel:
    """A model in fp16 whose decoder's convolution gives so many times as much, which the norm behind it takes out."""
    half = load("random:tiny", precision="fp16")

    def change(part: Any) -> None:
        for parameter in part.decoder.up_blocks[-1].resnets[0].conv1.parameters():
            scaled(parameter, scale)

    part = changed(half.vae, change).half()
    if tiny:
        network = tiny_vae(8, (1,) * len(part.config.block_out_channels), half.latent_channels).half()
        half = replace(half, tiny_vae=TinyVae(network, "0"))
    return half.with_parts(vae=part)


def test_a_picture_that_overflows_in_fp16_is_decoded_again_in_fp32() -> None:
    sound, overflowing = Watching(in_half(1.0)), Watching(in_half(3e5))
    picture, other = solo(overflowing, wanted()), solo(sound, wanted())
    assert apart(picture, other) <= 4 and levels(other).std() > 10
    assert other.warnings == ()
    name = "the fp16 VAE of random:tiny returned NaN or infinity"
    assert picture.warnings == (f"{name}: the picture was decoded again in fp32",)


def test_of_a_batch_in_fp16_only_what_overflows_is_decoded_again() -> None:
    half = load("random:tiny", precision="fp16")
    half = half.with_parts(vae=copy.deepcopy(half.vae).half())
    parameters = [wanted(seed=seed, deterministic=False) for seed in range(3)]
    runner = Watching(half)
    sound = overflows(runner, parameters, lambda x: None)
    ended = overflows(runner, parameters, lambda x: scaled(x, 3e3))
    assert ended["0"].state is State.DONE and len(ended["0"].result.warnings) == 1 and levels(ended["0"].result).any()
    for index in (1, 2):
        assert not ended[str(index)].result.warnings
        assert (levels(ended[str(index)].result) == levels(sound[str(index)].result)).all()
    error = overflows(runner, parameters[:1], lambda x: scaled(x, HUGE))["0"].error
    assert str(error) == "the fp16 VAE of random:tiny, in fp32 too, returned NaN or infinity"


def test_a_tiny_decoder_in_fp16_is_run_again_in_fp32() -> None:
    half = in_half(1.0, tiny=True)
    assert half.tiny_vae is not None
    expected = solo(Watching(half), wanted(vae="tiny"))

    def change(net: Any) -> None:  # ReLUs pass a factor on, which the last convolution takes out again
        *inner, last = [layer for layer in net.decoder.modules() if isinstance(layer, nn.Conv2d)]
        scaled(inner[0].weight, 2e4)
        for layer in inner:
            if layer.bias is not None:
                scaled(layer.bias, 2e4)
        scaled(last.weight, 5e-5)

    network = changed(copy.deepcopy(half.tiny_vae.network).float(), change).half()
    picture = solo(Watching(replace(half, tiny_vae=TinyVae(network, "0"))), wanted(vae="tiny"))
    assert picture.warnings and "the fp16 tiny VAE of random:tiny returned" in picture.warnings[0]
    assert apart(picture, expected) <= 8 and levels(expected).std() > 1


def test_a_vae_of_weights_beyond_fp16_stays_in_fp32(tmp_path: Path) -> None:
    from pipeline.checkpoints import tiny

    folder = tiny.save(tmp_path / "wide", replace(SDXLShape(), vae_upcast=False))
    file = next((folder / "vae").glob("*.safetensors"))
    weights = load_file(file)
    weights["decoder.up_blocks.0.resnets.0.conv1.weight"] *= 1e7
    save_file(weights, file, {"format": "pt"})
    half = load(str(folder), precision="fp16")
    assert half.vae.dtype is torch.float32 and half.denoiser.dtype is torch.float16
    assert levels(solo(Watching(half), wanted())).std() > 10


def test_there_is_no_preview_of_what_is_not_finite() -> None:
    for one in (model(SHAPE), tiny_model(SHAPE)):
        crank = Crank(Watching(one))
        request = crank.submit("nan", wanted(steps=4, preview_every=1))
        while request.work is None or request.work.trajectory is None or request.work.trajectory.step < 2:
            crank.turn()
        builder = crank.runner._builder
        moved = request.work.trajectory
        assert builder._preview(request.parameters, moved) is not None
        assert builder._preview(request.parameters, replace(moved, x0=torch.full_like(moved.x0, torch.nan))) is None
        crank.run()


def test_there_is_no_preview_by_a_vae_that_overflows() -> None:
    one = model(SHAPE)
    broken = one.with_parts(vae=changed(one.vae, lambda part: scaled(part.decoder.conv_in.weight, 3e38)))
    assert vae.LinearPreview(broken)(torch.zeros(1, 4, 4, 4)) is None
    assert vae.LinearPreview(one)(torch.zeros(1, 4, 4, 4)) is not None


# -- networks before the denoiser --------------------------------------------------------------------------------------


def test_an_edit_whose_source_cannot_be_encoded_fails_alone() -> None:
    one = model(SHAPE)
    one = one.with_parts(vae=changed(one.vae, lambda part: scaled(part.encoder.conv_in.weight, 3e38)))
    edit = Edit(photograph(32).tobytes(), None, 0.7)
    request = failed(Watching(one), wanted(edit=edit, steps=5), wanted(seed=2))
    assert str(request.error) == f"the fp32 VAE's encoder of {one.name} returned NaN or infinity"


@pytest.mark.quick("torch", "kernels")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prompt_that_cannot_be_encoded_fails_alone(backend: str, kernels: ctypes.CDLL) -> None:
    one = model(SHAPE)
    ids = one.parts["tokenizer"]("zq", add_special_tokens=False).input_ids

    def change(encoder: Any) -> None:
        encoder.get_input_embeddings().weight[ids] = torch.finfo(torch.float32).max

    one = one.with_parts(text_encoder=changed(one.parts["text_encoder"], change))
    request = failed(Watching(one, **options_of(backend, kernels)), wanted(prompt="zq"), wanted(seed=2))
    assert str(request.error) == f"the fp32 text encoders of {one.name} returned NaN or infinity"


# -- what requests bring along -----------------------------------------------------------------------------------------


@pytest.mark.quick("controlnet_cond_embedding.conv_in.weight-torch", "conv_in.weight-kernels", "conv_in.weight-layers")
@pytest.mark.parametrize("backend", ["torch", "kernels", "layers"])
@pytest.mark.parametrize("key", ["controlnet_cond_embedding.conv_in.weight", "conv_in.weight"])
def test_a_control_network_that_overflows_is_the_requests(
    key: str, backend: str, kernels: ctypes.CDLL, tmp_path: Path
) -> None:
    net = controls.controlnet(model(SHAPE), 0)
    with torch.no_grad():
        scaled(net.get_parameter(key), 3e38)
        net.get_parameter(key).nan_to_num_(posinf=3e38, neginf=-3e38)
    controls.save(net, tmp_path, "broken")
    controls.save(controls.controlnet(model(SHAPE), 1), tmp_path, "sound")
    runner = Watching(model(SHAPE), controls=tmp_path, **options_of(backend, kernels))
    broken, sound = (wanted(seed=1, control=(controls.control(name, 32, 1),)) for name in ("broken", "sound"))
    request = failed(runner, broken, sound, wanted(seed=2))
    assert isinstance(request.error, Invalid) and request.error.field == "control.model"
    assert "the fp32 control network returned NaN or infinity" in str(request.error)


@pytest.mark.parametrize("plus", [False, True])
def test_an_image_prompt_that_overflows_is_the_requests(plus: bool, tmp_path: Path) -> None:
    ip_adapters.encoder(tmp_path)
    state = ip_adapters.state(model(SHAPE), 0, plus=plus)
    ip_adapters.save(ip_adapters.state(model(SHAPE), 1, plus=plus), tmp_path, "sound")
    key = next(key for key in state if "image_proj" in key and key.endswith("weight"))
    state[key] = torch.full_like(state[key], 3e38)
    ip_adapters.save(state, tmp_path, "broken")
    runner = Watching(model(SHAPE), image_prompts=tmp_path)
    broken, sound = (wanted(image_prompts=(ip_adapters.prompt(name, 1),)) for name in ("broken", "sound"))
    request = failed(runner, broken, sound, wanted(seed=2))
    assert isinstance(request.error, Invalid) and request.error.field == "image_prompts.model"
    assert "the fp32 IP-Adapter, or its encoder, returned NaN or infinity" in str(request.error)


def test_an_upscaler_that_overflows_is_the_requests(tmp_path: Path) -> None:
    path = upscalers.write(tmp_path, "broken", Shape(8, 4, 1))
    weights = load_file(path)
    weights["conv_last.weight"] = torch.full_like(weights["conv_last.weight"], 3e38)
    save_file(weights, path)
    runner = Watching(model(SHAPE), upscalers=UpscalerFolder(tmp_path))
    request = failed(runner, wanted(upscale=Upscale(model="broken")), wanted(seed=2))
    assert str(request.error) == "upscale: the fp32 upscaler broken returned NaN or infinity"


@pytest.fixture(scope="module")
def refiner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageModel]:
    yield refiners.load_second(tmp_path_factory.mktemp("models") / "tiny-refiner", SHAPE)


@pytest.mark.parametrize("part", ["unet", "text_encoder_2"])
def test_a_refiner_that_overflows_is_named(part: str, refiner: ImageModel) -> None:
    def change(module: Any) -> None:
        scaled((module.conv_in if part == "unet" else module.text_model.final_layer_norm).weight, 3e38)

    second = refiner.with_parts(**{part: changed(refiner.parts[part], change)})
    runner = Watching(model(SHAPE), refiner=second)
    share = Refining(model=second.name, **{"from": 0.6})
    request = failed(runner, wanted(steps=6, refiner=share), wanted(seed=2))
    label = "UNet" if part == "unet" else "text encoders"
    assert str(request.error) == f"the fp32 {label} of {second.name} returned NaN or infinity"


def test_the_model_itself_is_named_where_the_refiner_got_no_numbers(refiner: ImageModel) -> None:
    runner = Watching(model(SHAPE), refiner=refiner)
    crank = Crank(runner)
    request = crank.submit("nan", wanted(steps=6, refiner=Refining(model=refiner.name, **{"from": 0.6})))
    while request.work is None or request.work.trajectory is None:
        crank.turn()
    request.work.trajectory.x.fill_(torch.nan)
    crank.run()
    assert str(request.error) == f"the fp32 UNet of {model(SHAPE).name} returned NaN or infinity"


def test_a_depth_model_that_overflows_draws_no_map(tmp_path: Path) -> None:
    import numpy as np

    folder = depths.save(tmp_path / "wide")
    path = folder / "model.safetensors"
    weights = load_file(path)
    key = next(key for key in weights if key.startswith("head") and key.endswith("weight"))
    save_file({**weights, key: torch.full_like(weights[key], 3e38)}, path, {"format": "pt"})
    with pytest.raises(NotFinite, match=r"^the fp32 depth model wide returned NaN or infinity$"):
        DepthEstimator(folder)(np.asarray(photograph(64)))


# -- the flags ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_value_of_many_is_noticed(dtype: torch.dtype, value: float) -> None:
    x = torch.full((3, 5, 7), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite([x, torch.zeros(2, dtype=torch.long), torch.zeros(0)]) and finite_rows(x).all()
    x[1, 4, 6] = value
    assert not all_finite([torch.ones(2), x]) and finite_rows(x).tolist() == [True, False, True]


def test_the_error_keeps_its_words_between_processes() -> None:
    error = pickle.loads(pickle.dumps(NotFinite("the fp16 VAE of x")))
    assert str(error) == "the fp16 VAE of x returned NaN or infinity" and error.network == "the fp16 VAE of x"

"""Reads IP-Adapters of SDXL: NAME.safetensors, or a folder NAME with one, and the vision encoder that each reads with.

The keys are those of the authors' files (h94/IP-Adapter). Other files are refused by what their keys say they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from core.digests import digest_of
from core.failures import translate_device_errors
from pipeline.checkpoints.checkpoint import Header, read_header, sign_of
from pipeline.checkpoints.folder import ModelError
from pipeline.extensions import vision, weight_files
from pipeline.extensions.weight_files import PICKLE, PICKLES, SUFFIX, in_16_bits, is_file

if TYPE_CHECKING:
    import torch

    from pipeline.families.family import ImageModel
    from unet_opt.ip_adapter import IPAdapter

ENCODER = "image_encoder"
_TOKENS = 4  # of an adapter whose projection is one layer
MAX_TOKENS = 64
_HEAD = 64  # width of the resampler's heads
_PROJECTION, _KEYS = "image_proj.", "ip_adapter."
_COARSE, _FINE = f"{_PROJECTION}proj.weight", f"{_PROJECTION}latents"
# What other files are, by a pattern that a key has; the first that any key has decides.
_OTHERS = (
    (r"^image_proj\.perceiver_resampler\.", "is an IP-Adapter FaceID Plus, which is not supported"),
    (r"^image_proj\.proj\.3\.", "is an IP-Adapter Full Face, which is not supported"),
    (r"^image_proj\.proj\.2\.", "is an IP-Adapter FaceID, which is not supported"),
    (r"lora_(unet|te\d?)_|[._]lora(_[AB]|_down|_up|\.(up|down))[._]", "is a LoRA"),
    (r"^(control_model|controlnet_(cond_embedding|down_blocks)|input_hint_block)\.", "is a ControlNet"),
    (r"^(model\.diffusion_model|conditioner|first_stage_model)\.", "is a checkpoint"),
    (r"^(vision_model|visual_projection)\.", "is a vision encoder"),
    (r"^(conv_out|up_blocks)\.", "is a UNet"),
)
_RESAMPLER = (  # of one layer: our names, by the file's
    ("0.norm1.", "ln0."), ("0.norm2.", "ln1."), ("0.to_q.", "attn.to_q."), ("0.to_out.", "attn.to_out.0."),
    ("1.0.", "ff.0."), ("1.1.", "ff.1.net.0.proj."), ("1.3.", "ff.1.net.2."),
)  # fmt: skip


class AdapterFacts(NamedTuple):
    """The facts of an adapter while it is not in memory: the channels that it reads of its encoder, whether those
    are of hidden states, and its tokens.
    """

    channels: int
    fine: bool
    tokens: int


class IPAdapterFile(NamedTuple):
    """An adapter as it was read."""

    adapter: IPAdapter
    digest: str


def offered(folder: Path) -> list[str]:
    """The names in a folder of adapters, sorted; none if it cannot be read."""
    return weight_files.offered(
        folder,
        lambda path: is_file(path / ENCODER / "config.json") and bool(_weights(path)),
        lambda path: is_file(path / "config.json"),  # an encoder, as `find_encoder` takes it
    )


def find(folder: Path, name: str) -> Path:
    """The file of this name. Raises `ModelError`."""
    file = weight_files.path_of(folder, name)
    if is_file(file):
        return file
    own = _weights(weight_files.path_of(folder, name, ""))
    if len(own) > 1:
        raise _error(name, f"its folder holds several: {', '.join(path.name for path in own)[:200]}")
    if own:
        return own[0]
    if any((folder / f"{name}{ending}").exists() for ending in PICKLES):
        raise _error(name, PICKLE)
    raise _error(name, f"there is no {file.name} and no folder {name} in the folder of IP-Adapters")


def find_encoder(folder: Path, name: str, file: Path, adapter: AdapterFacts) -> Path:
    """The folder of the encoder whose output the adapter reads. Raises `ModelError`.

    That is the first whose widths fit, of `image_encoder` beside the file, of other encoders in the folder, and of
    `models/image_encoder` beside the folder, where the authors' repository has that of most of its adapters.
    """
    reasons = []
    for where in _encoders(folder, file):
        try:
            known = vision.widths(where)
        except ModelError as error:  # another may fit all the same
            reasons.append(str(error).replace(str(where), where.name))
            continue
        if known is None:
            continue
        if adapter.channels == (known.hidden if adapter.fine else known.embedding):
            return where
        reasons.append(f"{where.name} gives {known.hidden if adapter.fine else known.embedding}")
    reads = f"reads {'hidden states' if adapter.fine else 'embeddings'} of {adapter.channels} channels"
    why = "; ".join(reasons) if reasons else f"there is no encoder: a folder {ENCODER} with config.json, beside it"
    raise _error(name, f"{reads}, and {why}")


def size_bytes(folder: Path) -> int:
    """Return the size of all weight files in a folder of adapters, and of the encoder beside it."""
    inner = [path for own in _folders(folder) for path in (own, own / ENCODER)]
    files = {file for where in (folder, *inner, folder.parent / "models" / ENCODER) for file in _weights(where)}
    return sum(file.stat().st_size for file in files)


def _folders(folder: Path) -> list[Path]:
    """List the folders in a folder; none of one that cannot be read."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def check_header(name: str, file: Path, model: ImageModel) -> Header:
    """The header of a file that `find` returned, which fits this model's UNet. Raises `ModelError`, naming it."""
    with weight_files.errors("IP-Adapter", name, "adapter", file):
        header = read_header(file, file.name)
        _check_kind(file.name, header)
        _check_shapes(file.name, header, model.denoiser)
        return header


def read(name: str, file: Path, model: ImageModel, device: torch.device) -> IPAdapterFile:
    """The adapter in a file that `find` returned, for this model's UNet. Raises `ModelError`, naming it."""
    header = check_header(name, file, model)
    with weight_files.errors("IP-Adapter", name, "adapter", file):
        adapter = translate_device_errors(lambda: _load(file, header, device))
        return IPAdapterFile(adapter, digest_of(file.parent, [file]))


def _error(name: str, reason: object) -> ModelError:
    return ModelError(f"{name}: {reason}", kind="IP-Adapter")


def _weights(folder: Path) -> list[Path]:
    """The weight files right in a folder; none of one that may not be read."""
    try:
        return sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIX) and path.is_file())
    except OSError:
        return []


def _encoders(folder: Path, file: Path) -> Iterator[Path]:
    yield file.parent / ENCODER
    yield from _folders(folder)
    yield folder.parent / "models" / ENCODER


def _check_kind(name: str, header: Header) -> None:
    """Raise `ModelError` for a file that is no IP-Adapter, saying what else it is and which key tells."""
    if (other := sign_of(header, _OTHERS)) is not None:
        raise ModelError(f"{name}: {other.kind} (it has {other.key})")
    if _COARSE not in header.shapes and _FINE not in header.shapes:
        first = min(header.shapes, default="no key at all")
        raise ModelError(f"{name}: is no IP-Adapter or IP-Adapter Plus of SDXL: its first key is {first}")


def _check_shapes(name: str, header: Header, unet: Any) -> None:
    """Raise `ModelError` for a weight that is missing, of another shape, or unknown to an adapter of this UNet."""
    from unet_opt.ip_adapter import layer_shapes

    layers = layer_shapes(unet)
    width = layers[0][1]
    expected = _projection_shapes(header.shapes, width)
    for number, own in enumerate(layers):
        expected |= {f"{_KEYS}{2 * number + 1}.to_{part}_ip.weight": own for part in "kv"}
    for key, shape in expected.items():
        actual = header.shapes.get(key)
        if actual is None:
            raise ModelError(f"{name}: is of another model: it has no weights for {key}")
        if actual != shape:
            raise ModelError(f"{name}: is of another model: {key} is {[*actual]}, not {[*shape]}")
    if unknown := sorted(header.shapes.keys() - expected.keys()):
        raise ModelError(f"{name}: is of another model: it has no use for {unknown[0]}")
    if _FINE in expected and expected[_FINE][1] > MAX_TOKENS:
        raise ModelError(f"{name}: {_FINE} has {expected[_FINE][1]} tokens; at most {MAX_TOKENS} are supported")


def _projection_shapes(shapes: Mapping[str, tuple[int, ...]], width: int) -> dict[str, tuple[int, ...]]:
    """The shapes that a projection to tokens of this width has, by what its own keys leave open."""
    if _COARSE in shapes:
        channels = _last(shapes, _COARSE)
        own = {"proj.weight": (_TOKENS * width, channels), "proj.bias": (_TOKENS * width,)}
        own |= {"norm.weight": (width,), "norm.bias": (width,)}
        return {_PROJECTION + key: shape for key, shape in own.items()}
    hidden, channels = _last(shapes, _FINE), _last(shapes, f"{_PROJECTION}proj_in.weight")
    tokens = shapes[_FINE][1] if len(shapes[_FINE]) == 3 else 0
    found = {
        "latents": (1, tokens, hidden), "proj_in.weight": (hidden, channels), "proj_in.bias": (hidden,),
        "proj_out.weight": (width, hidden), "proj_out.bias": (width,), "norm_out.weight": (width,),
        "norm_out.bias": (width,),
    }  # fmt: skip
    numbers = {match[1] for key in shapes if (match := re.match(r"image_proj\.layers\.(\d+)\.", key))}
    for number in range(max(1, len(numbers))):
        at = f"layers.{number}."
        inner = max(1, shapes.get(f"{_PROJECTION}{at}0.to_q.weight", (0,))[0] // _HEAD) * _HEAD
        for norm in ("0.norm1", "0.norm2", "1.0"):
            found |= {f"{at}{norm}.weight": (hidden,), f"{at}{norm}.bias": (hidden,)}
        found |= {
            f"{at}0.to_q.weight": (inner, hidden), f"{at}0.to_kv.weight": (2 * inner, hidden),
            f"{at}0.to_out.weight": (hidden, inner), f"{at}1.1.weight": (4 * hidden, hidden),
            f"{at}1.3.weight": (hidden, 4 * hidden),
        }  # fmt: skip
    return {_PROJECTION + key: shape for key, shape in found.items()}


def _last(shapes: Mapping[str, tuple[int, ...]], key: str) -> int:
    """The last side of a tensor; 0 if there is none."""
    return (shapes.get(key) or (0,))[-1]


def _load(file: Path, header: Header, device: torch.device) -> IPAdapter:
    """The adapter of a file whose shapes fit. Raises `ModelError` for values that are not finite."""
    from safetensors.torch import load_file

    from unet_opt.ip_adapter import IPAdapter

    weights = {key: in_16_bits(tensor) for key, tensor in load_file(file, device=str(device)).items()}
    for key, tensor in weights.items():
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise ModelError(f"{file.name}: {key} has values that are not finite numbers")
    fine = _FINE in header.shapes
    own = {key.removeprefix(_PROJECTION): t.float() for key, t in weights.items() if key.startswith(_PROJECTION)}
    count = sum(key.endswith(".to_k_ip.weight") for key in weights)
    layers = [
        (weights[f"{_KEYS}{number}.to_k_ip.weight"], weights[f"{_KEYS}{number}.to_v_ip.weight"])
        for number in range(1, 2 * count, 2)
    ]
    projection, tokens, channels = _resampler(own) if fine else _linear(own)
    return IPAdapter(projection.eval().requires_grad_(False), layers, tokens, channels, fine)


def _linear(own: Mapping[str, torch.Tensor]) -> tuple[torch.nn.Module, int, int]:
    """diffusers' module of a projection that is one layer, its tokens, and the channels that it reads."""
    import torch
    from diffusers.models.embeddings import ImageProjection

    channels = own["proj.weight"].shape[1]
    with torch.device("meta"):
        projection = ImageProjection(channels, own["norm.weight"].shape[0], _TOKENS)
    projection.load_state_dict({key.replace("proj.", "image_embeds."): t for key, t in own.items()}, assign=True)
    return projection, _TOKENS, channels


def _resampler(own: Mapping[str, torch.Tensor]) -> tuple[torch.nn.Module, int, int]:
    """The same of IP-Adapter Plus."""
    import torch
    from diffusers.models.embeddings import IPAdapterPlusImageProjection

    _, tokens, hidden = own["latents"].shape
    channels, width = own["proj_in.weight"].shape[1], own["proj_out.weight"].shape[0]
    depth = sum(key.endswith(".to_q.weight") for key in own)
    heads = own["layers.0.0.to_q.weight"].shape[0] // _HEAD
    with torch.device("meta"):
        projection = IPAdapterPlusImageProjection(channels, width, hidden, depth, _HEAD, heads, tokens)
    state: dict[str, torch.Tensor] = {}
    for key, tensor in own.items():
        match = re.match(r"(layers\.\d+\.)(.*)", key)
        if match is None:
            state[key] = tensor
        elif match[2].startswith("0.to_kv."):
            state[f"{match[1]}attn.to_k.weight"], state[f"{match[1]}attn.to_v.weight"] = tensor.chunk(2)
        else:
            ours, theirs = next((new, old) for old, new in _RESAMPLER if match[2].startswith(old))
            state[match[1] + ours + match[2].removeprefix(theirs)] = tensor
    projection.load_state_dict(state, strict=True, assign=True)
    return projection, tokens, channels

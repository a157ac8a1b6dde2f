"""Image prompts of requests: IP-Adapters with their encoders, and the keys and values that they make of pictures."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from contract.image_prompt import FIELD, ImagePrompt
from pipeline.checkpoints.checkpoint import read_headers
from pipeline.checkpoints.folder import ModelError
from pipeline.extensions import ip_adapter_file
from pipeline.extensions.asset_cache import Asset, ReadFile
from pipeline.extensions.asset_folder import AssetFolder, stamp_of
from pipeline.extensions.extension import Extension, invalid
from pipeline.extensions.image_prompt_rows import ImagePromptLease, ImagePromptSteps, RequestImagePrompt
from pipeline.extensions.ip_adapter_file import AdapterFacts
from pipeline.extensions.vision import VisionEncoder

if TYPE_CHECKING:
    from contract.image import ImageParameters
    from core.config import Settings
    from pipeline.backends.backend import ImageBackend
    from pipeline.families.family import ImageModel
    from pipeline.request_state import ImageState
    from unet_opt.ip_adapter import IPAdapter

_SEEN = 64  # pictures whose tokens are kept


class ImagePromptFolder(AssetFolder["IPAdapter | VisionEncoder"]):
    """The IP-Adapters of one folder for one model, and their encoders, whose keys are paths."""

    kind, setting = "IP-Adapter", "DIPTYCH_IP_ADAPTER_MIB"

    def __init__(self, folder: Path, model: ImageModel, dtype: torch.dtype, capacity_bytes: int) -> None:
        """`dtype` is that of keys and values. `capacity_bytes` limits the adapters and encoders that are kept."""
        super().__init__(folder, capacity_bytes)
        self._model, self.dtype = model, dtype
        self.encoders: dict[str, Path] = {}  # keys of encoders, by the adapters' names, as last checked

    @property
    def held(self) -> Mapping[str, int]:
        """The bytes of the adapters that are in memory with their encoders, by name."""
        held = self.cache.held
        return {name: held[name] for name, own in tuple(self.encoders.items()) if name in held and own in held}

    def asset_names(self) -> list[str]:
        return ip_adapter_file.offered(self.folder)

    def size_bytes(self) -> int:
        return min(super().size_bytes(), ip_adapter_file.size_bytes(self.folder))

    def find_pair(self, name: str) -> tuple[Asset[Any], Asset[Any]]:
        """Return the adapter's current version, and that of its encoder. Raises `ModelError`."""
        with self.errors(name):
            adapter = self.find(name)
            file = ip_adapter_file.find(self.folder, name)
            where = ip_adapter_file.find_encoder(self.folder, name, file, adapter.facts)
            self.encoders[name] = where.resolve()
            return adapter, self.cache.find(where.resolve(), stamp_of(where))

    @contextmanager
    def errors(self, name: str) -> Iterator[None]:
        """Context that names the adapter in errors of its encoder."""
        try:
            yield
        except ModelError as error:
            if error.kind:
                raise
            where = self.encoders[name]
            raise self._error(name, error.detail.replace(str(where), where.name)) from error
        except OSError as error:
            raise self._error(name, f"cannot be read ({error.strerror or error})") from error

    def _stamp(self, name: str) -> Hashable:
        file = ip_adapter_file.find(self.folder, name)
        return file, *stamp_of(file)

    def _check_header(self, key: str | Path) -> None:
        if isinstance(key, Path):
            read_headers(key)
        else:
            ip_adapter_file.check_header(key, ip_adapter_file.find(self.folder, key), self._model)

    def _read(self, key: str | Path) -> ReadFile[IPAdapter | VisionEncoder]:
        device = self._model.device
        if isinstance(key, Path):
            # On a CPU in fp32, like the adapter: it runs once for each picture.
            encoder = VisionEncoder(key, device, torch.float32 if device.type == "cpu" else self._model.dtype)
            return ReadFile(encoder, encoder.digest, encoder.size_bytes)
        adapter, digest = ip_adapter_file.read(key, ip_adapter_file.find(self.folder, key), self._model, device)
        facts = AdapterFacts(adapter.channels, adapter.fine, adapter.tokens)
        return ReadFile(adapter, digest, adapter.size_bytes, facts)


class ImagePromptExtension(Extension[ImagePromptFolder]):
    field, model_field, card_field = FIELD, f"{FIELD}.model", ImagePrompt.OFFER
    unconfigured = "no folder of IP-Adapters is configured (--ip-adapter-dir, or DIPTYCH_IP_ADAPTER_DIR)"
    supported, waits = "image_prompts", True
    networks = "IP-Adapter, or its encoder,"

    def __init__(self, model: ImageModel, backend: ImageBackend, folder: ImagePromptFolder | None = None) -> None:
        super().__init__(model, backend, folder)
        self.steps = ImagePromptSteps(self.field)
        self._width = backend.denoiser.text_width
        self._seen: OrderedDict[tuple[str, str], Tensor] = OrderedDict()

    @classmethod
    def open(cls, settings: Settings, model: ImageModel, backend: ImageBackend) -> Self:
        if not settings.ip_adapter_dir or not model.family.image_prompts:
            return cls(model, backend)
        path, capacity = Path(settings.ip_adapter_dir), settings.ip_adapter_mib * 2**20
        return cls(model, backend, ImagePromptFolder(path, backend.model, backend.denoiser.lowering.dtype, capacity))

    @property
    def refusal(self) -> str:
        family = self.model.family
        if family.image_prompts and getattr(self.model.denoiser.up_blocks[-1], "attentions", None):
            return "is not supported by a UNet with attention in its last block"  # shallow steps compute without them
        return super().refusal

    def _check_files(self, request: ImageParameters) -> None:
        for name in dict.fromkeys(prompt.model for prompt in self._prompts(request)):
            self._files.check_room(self._files.find_pair(name), name, " with its encoder")

    def size_bytes(self, request: ImageParameters, checked: None, rows: int, chunks: int) -> int:
        """Return the size of keys and values."""
        return rows * sum(self._tokens(request)) * self._width * self._files.dtype.itemsize

    def acquire(self, request: ImageParameters, checked: None, *, wait: bool) -> ImagePromptLease | None:
        encoders = {prompt.model: self._files.encoders[prompt.model] for prompt in self._prompts(request)}
        keys: list[Hashable] = [*encoders, *dict.fromkeys(encoders.values())]
        files = self._files.cache.take(keys, wait=wait)
        if files is None:
            return None
        own = dict(zip(keys, files, strict=True))
        pairs = {name: (own[name], own[encoder]) for name, encoder in encoders.items()}
        return ImagePromptLease(files, pairs, self._tokens(request))

    def release(self, lease: ImagePromptLease, *, keep: bool = False) -> None:
        super().release(lease, keep=keep)
        lease.files = []

    def prepare(self, request: ImageParameters, state: ImageState, hidden: Tensor) -> Iterable[Tensor]:
        lease: ImagePromptLease = state.extensions[self.field]
        if not lease.prompts:
            with invalid(self.model_field), torch.inference_mode():
                lease.prompts = tuple(self._prepared(lease, prompt, state) for prompt in self._prompts(request))
            self.release(lease)
        return [keys for prompt in lease.prompts for keys in prompt.keys.values()]

    def _prepared(self, lease: ImagePromptLease, prompt: ImagePrompt, state: ImageState) -> RequestImagePrompt:
        """Compute keys and values: of two rows the first reads a picture of nothing, as in diffusers."""
        pair, rows = lease.pairs[prompt.model], state.most_rows
        with self._files.errors(prompt.model):
            adapter, encoder = (self._files.cache.content(asset) for asset in pair)
        digest = hashlib.sha256(":".join(asset.digest for asset in pair).encode()).hexdigest()[:16]
        assert not isinstance(adapter, VisionEncoder)
        tokens = self._pictures_tokens(adapter, encoder, digest, prompt)[-rows:]
        keys = adapter.keys(tokens, prompt.strength).to(self._files.dtype)
        return RequestImagePrompt(prompt.model, digest, {1: keys[-1:], rows: keys}, state.acts(prompt))

    def _pictures_tokens(self, adapter: Any, encoder: Any, digest: str, prompt: ImagePrompt) -> Tensor:
        """Return tokens [2, T, D] of a picture of nothing, and of the prompt's, each computed alone; those of the last
        pictures are kept.
        """
        key = (digest, prompt.digest)
        if key not in self._seen:
            fitted = encoder.fit(prompt.pixels, (prompt.width, prompt.height))
            seen = encoder.embed(fitted, fine=adapter.fine)
            # Without a picture Plus reads a grey one; the other kind an embedding of zeros.
            nothing = encoder.embed(torch.zeros_like(fitted), fine=True) if adapter.fine else torch.zeros_like(seen)
            self._seen[key] = torch.cat([adapter.project(nothing), adapter.project(seen)])
        self._seen.move_to_end(key)
        while len(self._seen) > _SEEN:
            self._seen.popitem(last=False)
        return self._seen[key]

    def _prompts(self, request: ImageParameters) -> tuple[ImagePrompt, ...]:
        prompts: tuple[ImagePrompt, ...] = getattr(request, self.field)
        return prompts

    def _tokens(self, request: ImageParameters) -> tuple[int, ...]:
        """Return the number of tokens of each checked prompt."""
        return tuple(self._files.cache.known(prompt.model).facts.tokens for prompt in self._prompts(request))

    def _used(self, lease: ImagePromptLease) -> Iterable[RequestImagePrompt]:
        return lease.prompts

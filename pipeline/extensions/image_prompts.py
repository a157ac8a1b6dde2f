"""Image prompts of requests: IP-Adapters of one folder, and the keys and values that they make of a picture, once."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from contract.image_prompt import ImagePrompt
from pipeline.checkpoints.checkpoint import read_headers
from pipeline.checkpoints.folder import ModelError
from pipeline.extensions import ip_adapter_file
from pipeline.extensions.asset_cache import Asset, ReadFile
from pipeline.extensions.asset_folder import AssetFolder, stamp_of
from pipeline.extensions.ip_adapter_file import AdapterFacts
from pipeline.extensions.vision import VisionEncoder

if TYPE_CHECKING:
    from pipeline.families.family import ImageModel
    from unet_opt.ip_adapter import IPAdapter

_SEEN = 64  # pictures whose tokens are kept


class RequestImagePrompt(NamedTuple):
    """What is made of a request's image prompt: keys and values [R, T, width] by the request's rows, which `acts` says
    in which steps they are read.
    """

    name: str
    digest: str  # of the adapter's and the encoder's files
    keys: Mapping[int, Tensor]
    acts: tuple[bool, ...]


@dataclass(slots=True, eq=False)
class ImagePromptLease:
    """A request's adapters until its prompts are encoded, then what they made; and the tokens of each prompt."""

    files: list[Asset[Any]]
    pairs: Mapping[str, tuple[Asset[Any], Asset[Any]]]  # the same by the adapters' names, each with its encoder
    tokens: tuple[int, ...]
    prompts: tuple[RequestImagePrompt, ...] = ()


class ImagePromptFolder(AssetFolder["IPAdapter | VisionEncoder"]):
    """The IP-Adapters of one folder for one model, and their encoders, whose keys are paths."""

    kind = "IP-Adapter"

    def __init__(self, folder: Path, model: ImageModel, dtype: torch.dtype, capacity_bytes: int) -> None:
        """`dtype` is that of keys and values. `capacity_bytes` limits the adapters and encoders that are kept."""
        super().__init__(folder, capacity_bytes)
        self._model, self._dtype = model, dtype
        self._encoders: dict[str, Path] = {}  # keys, by the adapters' names, of the last check
        self._seen: OrderedDict[tuple[str, str], Tensor] = OrderedDict()

    @property
    def held(self) -> Mapping[str, int]:
        """Bytes of the adapters that are in memory with their encoders, by name."""
        held = self.cache.held
        return {name: held[name] for name, own in tuple(self._encoders.items()) if name in held and own in held}

    def names(self) -> list[str]:
        return ip_adapter_file.offered(self.folder)

    def check(self, prompts: Sequence[ImagePrompt]) -> None:
        """Check that the adapters exist and fit, and read them. Raises `ModelError`."""
        for name in dict.fromkeys(prompt.model for prompt in prompts):
            assets = self._find_pair(name)
            needed, room = sum(asset.size_bytes for asset in assets), self.cache.capacity
            if needed > room:
                own = f"it needs {needed} bytes with its encoder"
                raise self._error(name, f"{own}, and there is room for {room} (DIPTYCH_IP_ADAPTER_MIB)")

    def take(self, given: Sequence[ImagePrompt], *, wait: bool = False) -> ImagePromptLease | None:
        encoders = {prompt.model: self._encoders[prompt.model] for prompt in given}
        keys: list[Hashable] = [*encoders, *dict.fromkeys(encoders.values())]
        files = self.cache.take(keys, wait=wait)
        if files is None:
            return None
        own = dict(zip(keys, files, strict=True))
        pairs = {name: (own[name], own[encoder]) for name, encoder in encoders.items()}
        return ImagePromptLease(files, pairs, self.tokens(given))

    def tokens(self, prompts: Sequence[ImagePrompt]) -> tuple[int, ...]:
        """The number of tokens of each checked prompt."""
        return tuple(self.cache.known(prompt.model).facts.tokens for prompt in prompts)

    def request_bytes(self, prompts: Sequence[ImagePrompt], rows: int, width: int) -> int:
        """That the keys and values of checked prompts take, of so many channels (`Network.text_width`)."""
        return rows * sum(self.tokens(prompts)) * width * self._dtype.itemsize

    @torch.inference_mode()
    def prepare(
        self, lease: ImagePromptLease, prompts: Sequence[ImagePrompt], rows: int,
        acts_of: Callable[[ImagePrompt], tuple[bool, ...]],
    ) -> tuple[RequestImagePrompt, ...]:  # fmt: skip
        """The keys and values of each prompt: of two rows the first reads a picture of nothing, as in diffusers.

        `acts_of` says in which steps each one acts. On the thread that computes. Raises `ModelError`.
        """
        made = []
        for prompt in prompts:
            pair = lease.pairs[prompt.model]
            with self._errors(prompt.model):
                adapter, encoder = self.cache.content(pair[0]), self.cache.content(pair[1])
            digest = hashlib.sha256(":".join(asset.digest for asset in pair).encode()).hexdigest()[:16]
            assert not isinstance(adapter, VisionEncoder)
            tokens = self._tokens_of(adapter, encoder, digest, prompt)[-rows:]
            own = adapter.keys(tokens, prompt.strength).to(self._dtype)
            made.append(RequestImagePrompt(prompt.model, digest, {1: own[-1:], rows: own}, acts_of(prompt)))
        return tuple(made)

    def size_bytes(self) -> int:
        return min(super().size_bytes(), ip_adapter_file.size_bytes(self.folder))

    def _tokens_of(self, adapter: Any, encoder: Any, digest: str, prompt: ImagePrompt) -> Tensor:
        """[2, T, D]: of a picture of nothing, and of the prompt's, each computed alone; kept for the last pictures."""
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

    def _find_pair(self, name: str) -> tuple[Asset[Any], Asset[Any]]:
        """The adapter's current version, and that of its encoder. Raises `ModelError`."""
        with self._errors(name):
            adapter = self.find(name)
            file = ip_adapter_file.find(self.folder, name)
            where = ip_adapter_file.find_encoder(self.folder, name, file, adapter.facts)
            self._encoders[name] = where.resolve()
            return adapter, self.cache.find(where.resolve(), stamp_of(where))

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Context that names the adapter in errors of its encoder."""
        try:
            yield
        except ModelError as error:
            if error.kind:
                raise
            where = self._encoders[name]
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

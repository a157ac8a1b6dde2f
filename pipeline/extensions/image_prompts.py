"""IP-Adapters of one folder with their encoders, and what they make of a request's pictures."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

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


class RequestImagePrompt(NamedTuple):
    """The keys and values [R, T, width] of a request's image prompt, by the request's rows; `acts`: in which steps they
    are read.
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

    kind, setting = "IP-Adapter", "DIPTYCH_IP_ADAPTER_MIB"

    def __init__(self, folder: Path, model: ImageModel, dtype: torch.dtype, capacity_bytes: int) -> None:
        """`dtype` is that of keys and values. `capacity_bytes` limits the adapters and encoders that are kept."""
        super().__init__(folder, capacity_bytes)
        self._model, self.dtype = model, dtype
        self.encoders: dict[str, Path] = {}  # keys of encoders, by the adapters' names, as last checked

    @property
    def held(self) -> Mapping[str, int]:
        """Bytes of the adapters that are in memory with their encoders, by name."""
        held = self.cache.held
        return {name: held[name] for name, own in tuple(self.encoders.items()) if name in held and own in held}

    def names(self) -> list[str]:
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

"""LoRA adapters of a text model: PEFT's folders in one folder, read when first requested and cached by last use."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable
from pathlib import Path

from contract.errors import Invalid
from contract.loras import is_name, normal
from llm.backends.backend import TextBackend
from llm.features import adapters
from llm.features.adapters import CONFIG, WEIGHTS, TextAdapter
from pipeline.checkpoints.folder import ModelError, first_line
from pipeline.extensions import weight_files
from pipeline.extensions.asset_cache import ReadFile
from pipeline.extensions.asset_folder import AssetFolder, stamp_of

_MOST_CONFIG = 2**20  # bytes
_FIELD = "model"  # of requests, which names them


class TextLoraFolder(AssetFolder[TextAdapter]):
    """The adapters of one folder that requests of one model may name: an `llm.features.adapters.AdapterSource`."""

    kind, setting = "lora", "DIPTYCH_TEXT_LORAS_MIB"
    missing = "there is no {} in the folder of text LoRAs"

    def __init__(self, folder: Path, backend: TextBackend, capacity_bytes: int) -> None:
        """`capacity_bytes` limits what they take as packed for the kernels, those in use included."""
        super().__init__(folder, capacity_bytes)
        self._backend = backend

    def asset_names(self) -> list[str]:
        try:
            names = sorted({normal(path.name) for path in self.folder.iterdir() if weight_files.is_file(path / CONFIG)})
        except OSError:
            return []
        return [name for name in names if is_name(name)]

    def check(self, name: str) -> None:
        try:
            self.check_room([self.find(name)])
        except ModelError as error:
            raise Invalid(_FIELD, error.detail) from error

    def acquire(self, name: str, *, wait: bool) -> TextAdapter | None:
        leases = self.cache.take([name], wait=wait)
        if leases is None:
            return None
        try:
            content = self.cache.content(leases[0])
        except BaseException as error:
            self.cache.give(leases)
            if isinstance(error, ModelError):
                raise Invalid(_FIELD, error.detail) from error
            raise
        return TextAdapter(content.packed, content.key, leases)

    def release(self, adapter: TextAdapter) -> None:
        self.cache.give(adapter.lease)

    def _path(self, name: str) -> Path:
        return weight_files.path_of(self.folder, name, "") / WEIGHTS

    def _stamp(self, name: str) -> Hashable:
        if not is_name(name):
            raise self._error(name, self.missing.format(name))
        path = self._path(name)
        about = super()._stamp(name)
        try:
            if (size := path.stat().st_size) > 2 * self.cache.capacity:  # factors are rounded to no less than half
                raise self._too_large(name, size // 2)
            return about, stamp_of(path.with_name(CONFIG))
        except OSError:
            raise self._error(name, self.missing.format(f"{name}/{CONFIG}")) from None

    def _read(self, key: str) -> ReadFile[TextAdapter]:
        data, path = self._data(key), self._path(key).with_name(CONFIG)
        try:
            if path.stat().st_size > _MOST_CONFIG:
                raise ValueError(f"{CONFIG} is larger than {_MOST_CONFIG} bytes")
            text = path.read_bytes()
            state = weight_files.tensors(data)
            packed = self._backend.pack(adapters.factors(json.loads(text), state, self._backend.model.network))
        except (OSError, ValueError, RecursionError) as error:
            raise self._error(key, f"does not fit ({first_line(error)})") from error
        digest = hashlib.sha256(hashlib.sha256(text).digest() + hashlib.sha256(data).digest()).hexdigest()
        return ReadFile(TextAdapter(packed, -int(digest[:15], 16) - 1), digest, packed.size_bytes)

"""Caches quantized variants of models that have none of their own.

A variant is stored in `quantized/DIGEST` of the cache, where the digest covers all that it was made from. It is written
next to its place and renamed when complete; other processes that need it wait for the first.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from contract.card import ImageDefaults
from contract.precision import Scheme
from core.quant import store
from core.quant.convert import RecipeError
from core.quant.statistics import StatisticsError
from pipeline.checkpoints.folder import ModelError
from pipeline.quantization import quantized
from pipeline.quantization.calibration import default_prompts, settings_of
from pipeline.quantization.quantized_parts import folder

if TYPE_CHECKING:
    from pipeline.families.family import Family, ImageModel

_VERSION = 1  # to be raised when recipes or the collection of ranges change: variants are then rebuilt


@dataclass(frozen=True)
class CachedVariant:
    """A variant's path; it may not exist yet."""

    folder: Path
    scheme: Scheme
    parts: tuple[str, ...]  # the denoiser first

    @property
    def denoiser(self) -> Path:
        return folder(self.folder, self.parts[0], self.scheme)

    @property
    def exists(self) -> bool:
        return all((folder(self.folder, part, self.scheme) / store.MANIFEST).is_file() for part in self.parts)

    def make(
        self,
        open_model: Callable[[], tuple[ImageModel, ctypes.CDLL | None]],
        *,
        tell: Callable[[int, int], None] = lambda done, total: None,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Quantize the model and store the variant, unless another process already has.

        `open_model` returns the unquantized model, and the CPU's kernels; it is called only if needed. `tell` receives
        the prompts done and their number; `wait` is called once before waiting for another process. An interrupted
        calibration resumes. Raises `ModelError`, also for a cache that is not writable, and what `open_model` raises.
        """
        prompts, partial = default_prompts(), self._sibling(".part")
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with _locked(FileLock(self._sibling(".lock")), wait):
                if self.exists:
                    return
                model, kernels = open_model()
                quantized.make(
                    model, prompts, partial, scheme=self.scheme, kernels=kernels,
                    tell=lambda done: tell(done, len(prompts)),
                )  # fmt: skip
                if self.folder.exists():  # a part of it was deleted
                    shutil.rmtree(self.folder)
                partial.rename(self.folder)
        except OSError as error:
            raise self._unusable(f"{error.filename or self.folder}: {error.strerror or error}") from error
        except (store.QuantizedStoreError, StatisticsError, RecipeError) as error:
            if error.__cause__ is None:
                raise ModelError(f"cannot be quantized to {self.scheme}: {error}") from error
            raise self._unusable(str(error)) from error

    def _sibling(self, ending: str) -> Path:
        return self.folder.with_name(self.folder.name + ending)

    def _unusable(self, reason: str) -> ModelError:
        return ModelError(
            f"cannot be quantized to {self.scheme}: the cache cannot be used ({reason}); "
            "DIPTYCH_CACHE_DIR names another"
        )


def find(
    cache: Path, source: str, family: Family, scheme: Scheme, precision: str, defaults: ImageDefaults | None = None
) -> CachedVariant:
    """Return the path for the variant of a model whose weights have the digest `source`, calibrated in `precision`.

    `defaults` are the model's, where they are not the family's.
    """
    made_from = {
        "version": _VERSION,
        "weights": source,
        "scheme": scheme,
        "alpha": family.alpha,
        "precision": precision,
        **quantized.calibration_of(scheme, default_prompts(), settings_of(family, defaults or family.defaults)),
    }
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]
    return CachedVariant(cache / "quantized" / digest, scheme, family.quantized)


@contextmanager
def _locked(lock: FileLock, wait: Callable[[], None]) -> Iterator[None]:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        wait()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()

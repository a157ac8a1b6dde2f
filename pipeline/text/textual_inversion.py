"""The textual inversions (Gal et al., 2022) of one folder: vectors that stand for a word of a prompt."""

from __future__ import annotations

import hashlib
import re
import threading
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from contract.errors import Invalid
from contract.loras import is_name, normal
from pipeline.checkpoints.folder import ModelError
from pipeline.extensions.asset_cache import ReadFile
from pipeline.extensions.asset_folder import AssetFolder
from pipeline.extensions.weight_files import PICKLES, SUFFIX, tensors

_MAX_FILE_BYTES = 16 * 2**20
_KEPT = 256  # files in memory
_TRAINERS = {"clip_l": "text_encoders_0", "clip_g": "text_encoders_1"}  # keys of diffusers' training scripts
_ESCAPED = re.compile(r"\\([()\[\]{}])")


@dataclass(frozen=True, slots=True)
class TextualInversion:
    """The vectors of an embedding file by encoder, [n, D] each. `digest` is the file's SHA-256."""

    name: str
    digest: str
    vectors: Mapping[str, Tensor] = field(compare=False, repr=False)


class EmbeddingFolder(AssetFolder[TextualInversion]):
    """The embeddings of one folder, read when a prompt first names them.

    A prompt names one as a word: NAME, or embedding:NAME. Words that are no file's name are ordinary words.
    """

    kind = "embedding"
    missing = "{} is no longer in the folder"

    def __init__(self, folder: Path, widths: Mapping[str, int], max_vectors: int) -> None:
        """Open the folder. `widths` are the channels of each encoder's token embeddings, by the files' keys (clip_l,
        clip_g), and `max_vectors` limits the vectors of one embedding, which is never split between chunks of tokens.
        """
        super().__init__(folder, _KEPT, most_bytes=_MAX_FILE_BYTES)
        self._widths = widths
        self._max_vectors = max_vectors
        self._listed: tuple[int, re.Pattern[str] | None] = (-1, None)
        self._listing = threading.Lock()

    def named_in(self, texts: Mapping[str, str]) -> tuple[TextualInversion, ...]:
        """Return the embeddings that these fields' texts name, by name. Raises `Invalid`, naming field and file."""
        embeddings: dict[str, TextualInversion] = {}
        for name, text in texts.items():
            pattern = self._pattern()
            spellings = (text, _ESCAPED.sub(r"\1", text))  # of names with brackets in prompts with weights
            matches = (match for spelling in spellings for match in pattern.finditer(spelling)) if pattern else ()
            for word in {normal(match[1]) for match in matches}:
                try:
                    embeddings[word] = self.get(word)
                except ModelError as error:
                    raise Invalid(name, str(error)) from error
        return tuple(embeddings[name] for name in sorted(embeddings))

    def _pattern(self) -> re.Pattern[str] | None:
        """Return a pattern of names, also of pickles, which are refused; it follows the folder's changes."""
        try:
            stamp = self.folder.stat().st_mtime_ns
            with self._listing:
                if self._listed[0] != stamp:
                    files = (path for path in self.folder.iterdir() if path.suffix in (SUFFIX, *PICKLES))
                    self._listed = stamp, words({normal(path.stem) for path in files if is_name(normal(path.stem))})
        except OSError:
            return None
        return self._listed[1]

    def _read(self, key: str) -> ReadFile[TextualInversion]:
        file = self._path(key).name
        try:
            data = self._path(key).read_bytes()
            state = tensors(data)
        except OSError as error:
            raise self._error(key, f"{file} cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise self._error(key, f"{file} {error}") from error
        vectors = {
            part: self._fitted(key, file, part, state.get(part, state.get(_TRAINERS.get(part, ""))))
            for part in self._widths
        }
        digest = hashlib.sha256(data).hexdigest()
        return ReadFile(TextualInversion(key, digest, vectors), digest, 1)

    def _fitted(self, name: str, file: str, key: str, tensor: Tensor | None) -> Tensor:
        """Return vectors [n, D] in fp32."""
        if tensor is None:
            raise self._error(name, f"{file} has no {key}; wanted are {' and '.join(self._widths)}")
        vectors = tensor[None] if tensor.dim() == 1 else tensor
        width = self._widths[key]
        if vectors.dim() != 2 or vectors.shape[1] != width or not vectors.is_floating_point():
            shape = [*tensor.shape]
            raise self._error(name, f"{file}: {key} is {shape}, and this model needs [vectors, {width}] in floats")
        if not 1 <= len(vectors) <= self._max_vectors:
            raise self._error(
                name, f"{file}: {key} has {len(vectors)} vectors, at most {self._max_vectors} are allowed"
            )
        if not bool(torch.isfinite(vectors).all()):
            raise self._error(name, f"{file}: {key} holds what is no finite number")
        return vectors.float()


def words(names: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern of these names as words, as group 1, with or without `embedding:` before; None for no names."""
    spellings = {unicodedata.normalize(form, name) for name in names for form in ("NFC", "NFD")}  # texts have either
    longest_first = sorted(spellings, key=len, reverse=True)
    if not longest_first:
        return None
    return re.compile(rf"(?<![\w-])(?:embedding:)?({'|'.join(map(re.escape, longest_first))})(?![\w-]|\.\w)")

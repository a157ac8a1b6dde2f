"""Decides which answers of a text model are valid captions: complete, on one line, within the text encoders' context,
and new.

Imports no torch itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contract.card import MAX_PROMPT_CHARACTERS
from contract.characters import text_error

UNFINISHED, EMPTY, BROKEN, LONG, DUPLICATE = "unfinished", "empty", "broken", "too long", "duplicate"
REFUSED = "refused"
REASONS = {
    REFUSED: "were not accepted by the text model",
    UNFINISHED: "did not end within --max-tokens",
    EMPTY: "held no words",
    BROKEN: "held control characters or half a character",
    LONG: "had more tokens than the picture model's text encoders read",
    DUPLICATE: "were there already",
}


def tokenizers(name: str) -> list[Any]:
    """Both tokenizers of an image model: a folder, a hub id, or a seeded model. Raises `ModelError`."""
    from transformers import CLIPTokenizer

    from pipeline.checkpoints import tiny
    from pipeline.checkpoints.folder import ModelError, first_line, read_json
    from pipeline.checkpoints.load import seeded

    if seeded(name):
        return [tiny.byte_tokenizer(), tiny.byte_tokenizer(pad="!")]
    folder, result = _folder(name), []
    for part in ("tokenizer", "tokenizer_2"):
        where = folder / part
        if not where.is_dir():
            raise ModelError(f"{name}: the part {part} is missing")
        read_json(where / "tokenizer_config.json")  # without its files the library makes one with an empty vocabulary
        if not (where / "tokenizer.json").exists():
            read_json(where / "vocab.json")
            if not (where / "merges.txt").is_file():
                raise ModelError(f"{where}: merges.txt is missing")
        try:
            result.append(CLIPTokenizer.from_pretrained(str(where), local_files_only=True))
        except Exception as error:  # many libraries, many exceptions: it does not load
            raise ModelError(f"{where}: does not load ({type(error).__name__}: {first_line(error)})") from error
    return result


def _folder(name: str) -> Path:
    """The tokenizers' folder; if `name` is a hub id and no folder, only they are downloaded first."""
    from pipeline.checkpoints import folder

    path = folder.local(name)  # it reports what is wrong
    if path is not None:
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["tokenizer/*", "tokenizer_2/*"]))
    except Exception as error:  # of many libraries: not available
        reason = f"{type(error).__name__}: {folder.first_line(error)}"
        raise folder.ModelError(f"{name}: cannot be downloaded ({reason})") from error


def squeeze(text: str) -> str:
    """A text on one line, without the quotes that models often add."""
    return " ".join(text.split()).strip(' "“”')


def key(text: str) -> str:
    """A key, equal for captions that differ only in case and spaces."""
    return "".join(text.casefold().split())


class CaptionFilter:
    """Rejects answers with a reason, and remembers accepted ones."""

    def __init__(self, tokenizers: Sequence[Any]) -> None:
        self._tokenizers = tokenizers
        self._kept: set[str] = set()

    def tokens(self, caption: str) -> int:
        """The token count of the encoder that splits it finest, both special tokens included."""
        return max(len(tokenizer(caption, verbose=False).input_ids) for tokenizer in self._tokenizers)

    def wrong(self, text: str, complete: bool) -> str | None:
        """Return why an answer is no valid caption, duplicates aside, or None. `complete`: it ended by itself."""
        if not complete:
            return UNFINISHED
        if "\ufffd" in text or text_error(text, MAX_PROMPT_CHARACTERS) is not None:
            return BROKEN
        caption = squeeze(text)
        if not any(character.isalnum() for character in caption):
            return EMPTY
        reach = min(tokenizer.model_max_length for tokenizer in self._tokenizers)
        return LONG if self.tokens(caption) > reach else None

    def has(self, caption: str) -> bool:
        return key(caption) in self._kept

    def keep(self, caption: str) -> None:
        self._kept.add(key(caption))

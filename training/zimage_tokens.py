"""Stage `zimage_tokens`: trains the Z-Image's vocabulary, and writes the table of all captions that it may be shown.

The vocabulary is byte-level with Qwen's own splitting of words, so that `Qwen2Tokenizer` of any version reads it. A
caption is kept with the chat template around it, as `ZImagePipeline` writes it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from evaluation.scenes import emoji
from pipeline.checkpoints.tiny_zimage import SPECIAL, byte_tokenizer, tokenizer_of
from training import captions, tokens
from training.run import TrainingRun, command

BUCKETS = (32, 64)  # tokens of a caption with its template; the transformer pads to multiples of 32
RECASED = 0.2  # share of the wordings that start with a capital letter, or are all lower case


def train(run: TrainingRun) -> None:
    """Write `zimage_tokens/tokenizer` and the caption table."""
    rows = emoji.read_rows(run.data)
    blank = byte_tokenizer()
    letters = [token for token in blank.get_vocab() if token not in SPECIAL]
    size = run.shapes.zimage_vocab - len(SPECIAL)
    vocab, merges = tokens.byte_pairs(_text(rows), size, letters, blank.backend_tokenizer)
    order = sorted(vocab, key=vocab.__getitem__)
    # A tiny corpus has fewer pairs than a vocabulary has room.
    order += [f"<|unused{number}|>" for number in range(size - len(order))]
    vocabulary = {token: number for number, token in enumerate((*order, *SPECIAL))}
    tokenizer_of(vocabulary, merges).save_pretrained(run.folder("zimage_tokens") / "tokenizer")
    caption_table(run, rows)


def tokenizer(run: TrainingRun) -> Any:
    """The trained `Qwen2Tokenizer`; raises `FileNotFoundError` before the stage has run."""
    from transformers import Qwen2Tokenizer

    folder = run.work / "zimage_tokens" / "tokenizer"
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: run the stage zimage_tokens first")
    return Qwen2Tokenizer.from_pretrained(folder)


def caption_table(run: TrainingRun, rows: list[emoji.PictureRow]) -> Tensor:
    """Token ids of every caption that training may draw: int16 [N, variants, 1 + colours, 64], padded at the right.

    Colour 0 is a caption without a background, the others follow `captions.COLOUR_NAMES`. Kept in
    `zimage_tokens/table-VARIANTS-SEED.pt`.
    """
    path = run.folder("zimage_tokens") / f"table-{run.variants}-{run.seed}.pt"
    if path.exists():
        states: Tensor = torch.load(path, weights_only=True)
        if len(states) == len(rows):
            return states
    reader = tokenizer(run)
    table = torch.empty(len(rows), run.variants, 1 + len(captions.COLOURS), BUCKETS[-1], dtype=torch.int16)
    for index, encoded_wordings in enumerate(wordings(rows, run.variants, run.seed)):
        texts = [
            text
            for wording in encoded_wordings
            for text in (wording, *(captions.with_background(wording, c) for c in captions.COLOURS))
        ]
        table[index] = encode(reader, texts).view(run.variants, -1, BUCKETS[-1]).to(torch.int16)
    torch.save(table, path)
    return table


def wordings(rows: list[emoji.PictureRow], count: int, seed: int) -> Iterator[list[str]]:
    """The wordings of `captions.wordings`, some of them recased."""
    draw = random.Random(seed)
    for row in rows:
        plain, *subjects = captions.subjects(row, count, draw)
        yield [plain, *(recased(subject, draw) for subject in subjects)]


def recased(text: str, draw: random.Random) -> str:
    """`text` as it is, or now and then as people type it: with a capital letter first, or all lower case."""
    kind = draw.random()
    if kind < RECASED / 2:
        return text[:1].upper() + text[1:]
    return text.lower() if kind < RECASED else text


def encode(reader: Any, texts: list[str]) -> Tensor:
    """Texts in their template to ids, int64 [B, 64], padded and truncated at the right."""
    written = [
        reader.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        for text in texts
    ]
    encoded = reader(written, padding="max_length", max_length=BUCKETS[-1], truncation=True, return_tensors="pt")
    ids: Tensor = encoded.input_ids
    return ids


def _text(rows: list[emoji.PictureRow]) -> list[str]:
    """Captions, and the chat template's own words."""
    return [*tokens.picture_text(rows), *["user\n", "\nassistant\n"] * 200]


if __name__ == "__main__":
    command(__doc__, train)

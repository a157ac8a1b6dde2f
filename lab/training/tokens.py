"""Stage `tokens`: trains the vocabularies, one for the images' text towers and one for the language model.

The image vocabulary has CLIP's own layout (lower-cased bytes, `</w>`, two special tokens last), so that `CLIPTokenizer`
of any version reads its `vocab.json` and `merges.txt`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from lab.scenes import emoji, subjects
from lab.training import captions, phrases, scenes
from lab.training.run import TrainingRun, command
from pipeline.checkpoints.tiny import TOKENS

START, END = "<|startoftext|>", "<|endoftext|>"
LM_SPECIAL = ("<|pad|>", "<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train(run: TrainingRun) -> None:
    """Write `tokens/clip`, `tokens/clip_2` (they differ only in the padding token, as SDXL's do) and `tokens/lm`."""
    rows = emoji.read_rows(run.data)
    folder = run.folder("tokens")
    composer = scenes.Composer(subjects.choose(rows, emoji.read_pictures(run.data, rows, run.size)), run.seed)
    composed = [composer.compose(index).caption for index in range(run.shapes.scenes)]
    composed += [subject.plural for subject in composer.subjects] * 12  # a plural in pieces would be a word of its own
    vocab, merges = _clip_vocab(picture_text(rows) + composed, run.shapes.vocab)
    for name, pad in (("clip", END), ("clip_2", "!")):
        _write_clip(folder / name, vocab, merges, pad)
    _write_lm(folder / "lm", phrases.corpus(run.data, rows), run.shapes.lm_vocab)


def clip_tokenizer(run: TrainingRun, second: bool = False) -> Any:
    """The trained `CLIPTokenizer`; `second` is SDXL's tokenizer_2. Raises `FileNotFoundError` before the
    stage has run.
    """
    from transformers import CLIPTokenizer

    return CLIPTokenizer.from_pretrained(_trained(run, "clip_2" if second else "clip"))


def lm_tokenizer(run: TrainingRun) -> Any:
    """The trained language-model tokenizer, with its chat template."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(_trained(run, "lm"))


def pad_ids(run: TrainingRun) -> tuple[int, int]:
    """Padding ids of the two picture tokenizers."""
    return clip_tokenizer(run).pad_token_id, clip_tokenizer(run, second=True).pad_token_id


def encode(tokenizer: Any, texts: list[str]) -> Tensor:
    """Texts to ids, int64 [B, TOKENS], padded and truncated as the pipeline does."""
    encoded = tokenizer(texts, padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt")
    ids: Tensor = encoded.input_ids
    return ids


def repad(ids: Tensor, end: int, pad: int) -> Tensor:
    """END-padded ids [B, L] to ids padded with `pad` behind the first END, as tokenizer_2 makes them."""
    after = (ids == end).long().cumsum(1) - (ids == end).long() > 0
    return torch.where(after, torch.full_like(ids, pad), ids)


def _trained(run: TrainingRun, name: str) -> Path:
    folder = run.work / "tokens" / name
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: run the stage tokens first")
    return folder


def picture_text(rows: list[emoji.PictureRow]) -> list[str]:
    """The text from which a tokenizer of prompts learns merges: captions as they will be drawn, names, keywords."""
    draw = random.Random(0)
    names = list(captions.COLOURS)
    text = [captions.with_background(row.name, draw.choice(names)) for row in rows]
    # Names without tone once more, else the 1,600 toned names would take most merges.
    text += sorted({captions.split_tone(row.name)[0] for row in rows}) * 4
    text += [" ".join(row.keywords) for row in rows if not captions.has_tone(row.name)] * 2
    return text


def byte_pairs(
    text: list[str], size: int, letters: list[str], reference: Any, **more: Any
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a text split as the tokenizer `reference` splits it."""
    trained = Tokenizer(models.BPE(**more))
    trained.normalizer, trained.pre_tokenizer = reference.normalizer, reference.pre_tokenizer
    trainer_options: Any = {"initial_alphabet": letters, "show_progress": False, "special_tokens": [], **more}
    trained.train_from_iterator(text, trainers.BpeTrainer(vocab_size=size, **trainer_options))
    model = json.loads(trained.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def _clip_vocab(text: list[str], size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Byte-pair vocabulary of exactly `size` tokens in CLIP's order: bytes, bytes at a word's end, merges,
    START, END.
    """
    from transformers import CLIPTokenizer

    blank = CLIPTokenizer().backend_tokenizer
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    _, vocabulary = byte_pairs(text, size, letters, blank, end_of_word_suffix="</w>")
    order = dict.fromkeys([*letters, *(letter + "</w>" for letter in letters)])
    merges: list[tuple[str, str]] = []
    for left, right in vocabulary:
        if len(order) == size - 2:
            break
        order[left + right] = None
        merges.append((left, right))
    for number in range(size - 2 - len(order)):  # a tiny corpus has fewer pairs than a vocabulary has room
        order[f"<|unused{number}|>"] = None
    order[START] = order[END] = None
    return {token: number for number, token in enumerate(order)}, merges


def _write_clip(folder: Path, vocab: dict[str, int], merges: list[tuple[str, str]], pad: str) -> None:
    from transformers import CLIPTokenizer

    tokenizer = CLIPTokenizer(vocab=vocab, merges=merges, pad_token=pad, model_max_length=TOKENS)
    tokenizer.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_lm(folder: Path, text: list[str], size: int) -> None:
    from transformers import PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(LM_SPECIAL),
        show_progress=False,
    )
    trained.train_from_iterator(text, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    command(__doc__, train)

"""Tokens in chunks: nothing lost, nothing moved, every chunk with a start, an end and the context's length."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contract import prompts
from contract.markup import A1111, MarkupError, WeightedPrompt
from pipeline.checkpoints.tiny import byte_tokenizer
from pipeline.text.chunks import Tokens, split
from pipeline.text.textual_inversion import TextualInversion

TOKENIZERS = {"first": byte_tokenizer(), "second": byte_tokenizer(pad="!")}
FIRST = TOKENIZERS["first"]
TEXT = st.text(st.sampled_from("abc xyz,.🦊é\n"), max_size=300)


def own(tokens: Tokens) -> list[int]:
    """The prompt's own ids, without starts, ends and padding, which weigh nothing."""
    return [int(one) for one in tokens.ids[tokens.parts >= 0]]


@given(TEXT, st.sampled_from(list(TOKENIZERS)), st.integers(1, 3))
def test_chunks_hold_all_tokens_in_order(text: str, name: str, least: int) -> None:
    tokenizer = TOKENIZERS[name]
    found, ids = split(tokenizer, text, least), tokenizer(text, add_special_tokens=False).input_ids
    assert own(found) == ids and found.count == len(ids)
    assert found.ids.shape == (max(least, -(-len(ids) // 75), 1), 77)
    assert (found.ids[:, 0] == tokenizer.bos_token_id).all()
    for chunk, parts in zip(found.ids, found.parts, strict=True):
        count = int((parts >= 0).sum())
        assert chunk[1 + count] == tokenizer.eos_token_id and (chunk[2 + count :] == tokenizer.pad_token_id).all()


@given(TEXT.filter(lambda text: len(text.encode()) < 70))
def test_one_chunk_is_what_the_tokenizer_itself_pads(text: str) -> None:
    for tokenizer in TOKENIZERS.values():
        whole = tokenizer(text, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
        assert torch.equal(split(tokenizer, text).ids, whole)


@given(st.text(st.sampled_from("ab ()[]:1.2BREAK"), max_size=200))
def test_weights_go_with_their_tokens(text: str) -> None:
    try:
        read = prompts.read(text, A1111)
    except MarkupError:
        return
    found = split(FIRST, read)
    if isinstance(read, str):
        assert (found.weights == 1).all()
        return
    for part, weight in zip(found.parts.flatten(), found.weights.flatten(), strict=True):
        assert weight == pytest.approx(read.parts[int(part)][1] if part >= 0 else 1)


def test_a_break_begins_a_chunk_and_a_full_one_is_not_doubled() -> None:
    def counts(text: str) -> list[int]:
        return (split(FIRST, prompts.read(text, A1111)).parts >= 0).sum(1).tolist()

    assert counts("a b BREAK c") == [2, 1]
    assert counts("BREAK a") == [0, 1] and counts("a BREAK") == [1, 0] and counts("a BREAK BREAK b") == [1, 0, 1]
    assert counts(" ".join("a" * 75) + " BREAK b") == [75, 1]
    assert counts(" ".join("a" * 76)) == [75, 1]


def embedding(vectors: int) -> TextualInversion:
    return TextualInversion("ink", "0", {"clip_l": torch.ones(vectors, 4)})


@pytest.mark.parametrize(("before", "chunk", "at"), [(0, 0, 1), (70, 0, 71), (71, 1, 1), (75, 1, 1), (80, 1, 6)])
def test_an_embedding_is_never_split(before: int, chunk: int, at: int) -> None:
    found = split(FIRST, " ".join(["a"] * before + ["ink", "b"]), 1, [embedding(5)], "clip_l")
    ((row, start, vectors),) = found.vectors
    assert (row, start, len(vectors)) == (chunk, at, 5) and found.count == before + 6
    assert own(found)[-1] == FIRST("b").input_ids[1]


def test_an_embeddings_vectors_have_the_weight_of_its_name() -> None:
    assert len(split(FIRST, "ink, inkwell embedding:ink", 1, [embedding(2)], "clip_l").vectors) == 2
    weighted = WeightedPrompt((("ink", 1.2), (" a", 1.0)), A1111)
    assert split(FIRST, weighted, 1, [embedding(2)], "clip_l").weights[0, 1:4].tolist() == pytest.approx([1.2, 1.2, 1])

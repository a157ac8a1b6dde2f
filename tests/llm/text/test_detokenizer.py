"""Text as it comes: what was told adds up, characters are whole, and no part of a stop is ever told."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from llm.families import tiny
from llm.text.detokenizer import Detokenizer
from tests.llm import stage

BYTES = tiny.tokenizer(512)


def written(writer: Detokenizer, tokens: list[int]) -> list[str]:
    told = []
    for token in tokens:
        told.append(writer.add(token))
        if writer.ended:
            break
    return [*told, writer.finish()]


@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=40))
def test_what_was_told_adds_up_and_is_never_taken_back(text: str) -> None:
    tokens = BYTES(text, add_special_tokens=False)["input_ids"]
    writer = Detokenizer(BYTES)
    told = written(writer, tokens)
    assert "".join(told) == text == writer.text
    assert all("�" not in piece for piece in told) or "�" in text


@given(text=st.text("abc", max_size=30), stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stops(text: str, stops: list[str]) -> None:
    """The text ends before the stop that is complete first; while it comes nothing is told that a stop may cut off."""
    writer = Detokenizer(BYTES, stops)
    told = written(writer, BYTES(text, add_special_tokens=False)["input_ids"])
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    # One letter comes at a time: of the stops that are complete at the same letter the one that began first.
    wanted = text if not ends else text[: min(start for end, start in ends if end == min(ends)[0])]
    assert writer.text == "".join(told) == wanted
    assert writer.ended == bool(ends)


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    least=st.integers(0, 31),
)
def test_stops_that_are_complete_within_the_least_tokens_are_text(text: str, stops: list[str], least: int) -> None:
    """As vLLM has it: a stop ends the text at its own last letter, if that comes after the first `min_tokens`."""
    writer = Detokenizer(BYTES, stops, min_tokens=least)
    parts = written(writer, BYTES(text, add_special_tokens=False)["input_ids"])
    lengths = range(least + 1, len(text) + 1)
    matched = ((end, [stop for stop in stops if text[:end].endswith(stop)]) for end in lengths)
    end, last = next(((end, last) for end, last in matched if last), (len(text), [""]))
    assert writer.text == "".join(parts) == text[: end - max(map(len, last))]
    assert writer.ended == (last != [""])


@pytest.mark.parametrize("text", ["A man riding a horse .", "  two  spaces", "naïve café 🍕!"])
def test_the_embedded_tokenizer(text: str) -> None:
    tokenizer = stage.emoji().tokenizer
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(written(Detokenizer(tokenizer), tokens)) == tokenizer.decode(tokens)


@given(st.lists(st.integers(0, 270), max_size=40))
def test_any_tokens_of_a_byte_vocabulary_are_what_the_library_decodes(tokens: list[int]) -> None:
    """Halves of characters, special tokens, and tokens that only the model has, whose vocabulary is padded."""
    writer = Detokenizer(BYTES)
    assert "".join(written(writer, tokens)) == writer.text == BYTES.decode(tokens, skip_special_tokens=True)


WORDS = ("▁the", "▁cat", "▁sat", "s", "▁", ".")


def sentencepiece(decoder: str) -> Tokenizer:
    """A tokenizer as Llama 2 and Mistral have it: words begin with a space, which its decoder takes off the first."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    tokenizer = Tokenizer(
        models.BPE({name: id for id, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(strip) if decoder == "strip" else decoders.Metaspace()
    return tokenizer


WORD = st.sampled_from(range(259, 259 + len(WORDS)))
CHARACTER = st.sampled_from("é🍕").map(lambda character: [3 + byte for byte in character.encode()])


@pytest.mark.parametrize("decoder", ["strip", "metaspace"])
@given(
    before=st.lists(WORD, max_size=20),
    pieces=st.lists(WORD.map(lambda id: [id]) | CHARACTER, min_size=1, max_size=8),
    controls=st.sampled_from([[], [1], [2, 1]]),
)
def test_a_continuation_begins_with_its_space(
    decoder: str, before: list[int], pieces: list[list[int]], controls: list[int]
) -> None:
    """Prompt and answer are what transformers decodes of both; alone it is a text of its own."""
    tokenizer = sentencepiece(decoder)
    tokens = [*itertools.chain(*pieces)]
    for context in ([1, *before, *controls], []):
        writer = Detokenizer(tokenizer, before=context)
        told = written(writer, tokens)
        start, whole = tokenizer.decode(context), tokenizer.decode([*context, *tokens])
        assert start + "".join(told) == start + writer.text == whole


def test_half_a_character_of_a_prompt_stays_there() -> None:
    half, _, *rest = BYTES("éab", add_special_tokens=False)["input_ids"]
    assert "".join(written(Detokenizer(BYTES, before=[half]), rest)) == "ab"


def test_the_engines_continuations_do_and_its_chats_do_not() -> None:
    tokenizer = sentencepiece("strip")
    model = replace(stage.small(), tokenizer=tokenizer)
    continuation = stage.greedy((1, 259, 260), 6, continues=True, logit_bias=((261, 100.0),))
    texts = stage.write(model, [continuation, replace(continuation, continues=False)])
    assert [text.text for text in texts] == [" sat" * 6, (" sat" * 6)[1:]]

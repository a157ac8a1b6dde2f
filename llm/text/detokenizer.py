"""Detokenizes a token stream into text: whole characters only, and nothing that may still become a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from llm.text.token_text import bytes_of

_REPLACEMENT = "\ufffd"
_CONTEXT = 8  # tokens before an answer that it is decoded with


class _ByteStream:
    """Decodes a vocabulary of bytes (GPT-2's, Llama 3's, Qwen's): each token has its own, whatever comes before it.

    A look-up instead of a call into the tokenizers library, which with hundreds of answers is most of a step's work.
    """

    def __init__(self, pieces: Sequence[str | bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = False

    def step(self, token: int) -> str:
        piece = self._pieces[token] if token < len(self._pieces) else ""  # models have room for more tokens
        if isinstance(piece, str) and not (self._partial and piece):
            return piece
        text = self._decoder.decode(piece.encode() if isinstance(piece, str) else piece)
        self._partial = bool(self._decoder.getstate()[0])
        return text

    def finish(self, text: str) -> str:
        """The text after `text` that ends here."""
        return self._decoder.decode(b"", final=True)


class _LibraryStream:
    """Decodes by the tokenizers library, after the tokens `before`: decoders of SentencePiece's vocabularies take a
    space off a text's beginning.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int]) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        context = list(before[-_CONTEXT:])
        self._before: str = tokenizer.decode(context, skip_special_tokens=True)
        if self._before.endswith(_REPLACEMENT):  # half a character
            context, self._before = [], ""
        self._ids = context
        self._stream = DecodeStream(ids=list(context), skip_special_tokens=True)

    def step(self, token: int) -> str:
        self._ids.append(token)
        return self._stream.step(self._tokenizer, token) or ""

    def finish(self, text: str) -> str:
        """The text after `text` that ends here."""
        whole: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)[len(self._before) :]
        return whole[len(text) :] if whole.startswith(text) else ""


@lru_cache(8)
def _pieces(tokenizer: Any) -> list[str | bytes] | None:
    """Each token's text, or its bytes where these are no whole characters; None for other vocabularies."""
    from tokenizers.decoders import ByteLevel

    if not isinstance(tokenizer.decoder, ByteLevel):
        return None
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    pieces: list[str | bytes] = [""] * (1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0))
    for piece, token in tokenizer.get_vocab(with_added_tokens=True).items():
        if token not in special:
            raw = bytes_of(piece)
            try:
                pieces[token] = raw.decode()
            except UnicodeDecodeError:
                pieces[token] = raw
    return pieces


class Detokenizer:
    """The text of one answer. `ended`: a stop string was found; what comes after it is dropped."""

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), before: Sequence[int] = (), *, min_tokens: int = 0
    ) -> None:
        """`before` are the tokens of a text that the answer continues. A stop string that is complete within the first
        `min_tokens` is text, as with vLLM.
        """
        tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        pieces = _pieces(tokenizer)
        self._stream = _LibraryStream(tokenizer, before) if pieces is None else _ByteStream(pieces)
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._unstoppable = min_tokens  # tokens to come
        self._text = ""
        self._told = 0
        self.ended = False

    @property
    def text(self) -> str:
        return self._text

    def add(self, token: int) -> str:
        """Add a token; returns the new text that is final by now."""
        piece = self._stream.step(token)
        if self._stop or not piece:
            delta = self._grown(piece) if piece else ""
            self._unstoppable -= 1
            return delta
        self._text += piece
        self._told = len(self._text)
        return piece

    def finish(self) -> str:
        """End of tokens: returns the text held back. An incomplete character becomes U+FFFD."""
        rest = "" if self.ended else self._stream.finish(self._text)
        return (self._grown(rest) if rest else "") + self._tell(len(self._text))

    def _grown(self, piece: str) -> str:
        before = len(self._text)
        self._text += piece
        if not self._stop:
            return self._tell(len(self._text))
        stops = self._stop if self._unstoppable <= 0 else ()
        met = [at for at in (self._text.find(stop, max(0, before - len(stop) + 1)) for stop in stops) if at >= 0]
        if met:
            self.ended = True
            self._text = self._text[: min(met)]
            return self._tell(len(self._text))
        return self._tell(len(self._text) - self._pending())

    def _pending(self) -> int:
        """The number of characters at the end may be the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(self._text)), 0, -1):
            end = self._text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0

    def _tell(self, until: int) -> str:
        delta, self._told = self._text[self._told : until], max(self._told, until)
        return delta

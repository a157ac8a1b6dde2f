"""Detokenizes a token stream into text: whole characters only, and nothing that may still become a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"
_CONTEXT = 8  # tokens before an answer that it is decoded with


class Detokenizer:
    """The text of one answer. `ended`: a stop string was found; what comes after it is dropped."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        """`before` are the tokens of a text that the answer continues: decoders of SentencePiece's vocabularies take
        a space off a text's beginning.
        """
        from tokenizers.decoders import DecodeStream

        self._tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        context = list(before[-_CONTEXT:])
        self._before: str = self._tokenizer.decode(context, skip_special_tokens=True)
        if self._before.endswith(_REPLACEMENT):  # half a character
            context, self._before = [], ""
        self._context = context
        self._stream = DecodeStream(ids=context, skip_special_tokens=True)
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._tokens: list[int] = []
        self._text = ""
        self._told = 0
        self.ended = False

    @property
    def text(self) -> str:
        return self._text

    def add(self, token: int) -> str:
        """Add a token; returns the new text that is final by now."""
        self._tokens.append(token)
        piece = self._stream.step(self._tokenizer, token)
        return self._grown(piece) if piece else ""

    def finish(self) -> str:
        """End of tokens: returns the text held back. An incomplete character becomes U+FFFD."""
        delta = ""
        if not self.ended:
            text = self._tokenizer.decode(self._context + self._tokens, skip_special_tokens=True)[len(self._before) :]
            if len(text) > len(self._text) and text.startswith(self._text):
                delta = self._grown(text[len(self._text) :])
        return delta + self._tell(len(self._text))

    def _grown(self, piece: str) -> str:
        start = max(0, len(self._text) - self._longest + 1)
        self._text += piece
        if not self._stop:
            return self._tell(len(self._text))
        met = [at for at in (self._text.find(stop, start) for stop in self._stop) if at >= 0]
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

"""Builds the prompts that request captions from a text model: in the form it was trained on, or as an instruction.

A caption is about a subject. Without given subjects, `emoji-lm` invents one itself: prompted with next to nothing at a
high temperature it names anything, torn words too, and when it then expands that as a prompt, a caption comes of it.
Other models get one of 288 themes: asked for just any caption, instruction models write the same few over and over, and
words that are drawn beforehand help (Eldan and Li, "TinyStories", 2023, section 2).

Imports no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from contract.bounds import MAX_SEED

SUBJECT = "{subject}"
MAX_TOKENS = 96  # as in an expanded prompt
IDEA_TEMPERATURE, IDEA_TOKENS = 1.2, 32
_OPEN = ((False, ""), (True, "draw"), (False, "draw an emoji"), (True, "an emoji of a"), (False, "draw"))
_INSTRUCTION = (
    "Write the caption of a picture, as somebody would who describes what is in it: one sentence of 8 to 20 words that "
    "says what is to be seen, what it looks like, and where it is. Answer with the caption alone, without quotes.\n\n"
    "The picture shows: {subject}"
)
_CONTINUED = """Captions of pictures.

Subject: a bird
Caption: A kingfisher with a blue back sits on a branch above a quiet river.

Subject: food on a table, seen from above
Caption: Two bowls of noodle soup with eggs and herbs on a dark wooden table.

Subject: a street, at night
Caption: A yellow tram turns a corner of a wet street under neon signs.

Subject: {subject}
Caption:"""
_KINDS = (
    "a wild animal", "a pet", "a bird", "an insect", "a fish or another animal of the sea", "a farm",
    "flowers", "trees", "fruit or vegetables", "a meal", "something sweet", "a drink",
    "a child", "an old man or woman", "people at work", "sport", "music", "a festival",
    "a car or a bus", "a train or a ship", "a house", "a street", "a room", "a tool or a machine",
)  # fmt: skip
_SIGHTS = (
    "from near", "from afar", "from above", "from below", "in the morning", "in the rain", "in the snow", "at night",
    "in strong colours", "in black and white", "as a painting", "as a toy",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CaptionRequest:
    """One text request. A chat's `messages`, or a `prompt` that is continued up to the line's end.

    With `idea` the answer is no caption but a subject, which may be torn and is not stored.
    """

    seed: int
    temperature: float
    top_p: float
    max_tokens: int
    messages: tuple[tuple[str, str], ...] = ()
    prompt: str | None = None
    subject: str = ""
    idea: bool = False

    @property
    def chat(self) -> bool:
        return self.prompt is None

    def fields(self) -> dict[str, Any]:
        """The request's fields, for the engine's text handler and for the API."""
        common = {
            "seed": self.seed, "temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens,
        }  # fmt: skip
        if self.chat:
            return {"messages": [{"role": role, "content": text} for role, text in self.messages], **common}
        return {"stop": ["\n"], **common}


def seed_of(seed: int, row: int, attempt: int) -> int:
    """The seed of a row's k-th attempt, below 2⁶³. No two rows share one, and neither do two files' seeds."""
    digest = hashlib.sha256(f"{seed}:{row}:{attempt}".encode()).digest()
    return int.from_bytes(digest[:8]) & MAX_SEED


def theme_of(seed: int) -> str:
    """A row's subject where none is given."""
    return f"{_KINDS[seed % len(_KINDS)]}, {_SIGHTS[seed // len(_KINDS) % len(_SIGHTS)]}"


class CaptionClient:
    """Requests captions from one text model."""

    def __init__(
        self,
        instruction: str,
        *,
        chat: bool,
        seed: int,
        subjects: Sequence[str] = (),
        template: str | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        """`instruction` is what it was trained to expand prompts by ("": it was not), `chat` whether it has a template.

        `template` replaces our own wording, with `{subject}` as the subject's placeholder. Temperature and top-p are
        those of captions; default: by model.
        """
        self.instruction = instruction
        self.chat = chat
        self.temperature = (0.7 if instruction else 1.0) if temperature is None else temperature
        self.top_p = (1.0 if instruction else 0.95) if top_p is None else top_p
        self.max_tokens = max_tokens
        self._seed = seed
        self._subjects = tuple(subjects)
        self._template = template

    def first(self, row: int, attempt: int) -> CaptionRequest:
        """The first question of a row's k-th attempt, both counted from 0."""
        seed = seed_of(self._seed, row, attempt)
        if self._subjects:
            return self._about(self._subjects[row % len(self._subjects)], seed)
        if not (self.instruction and self.chat):
            return self._about(theme_of(seed), seed)
        instructed, text = _OPEN[(row + attempt) % len(_OPEN)]
        messages = _messages(self.instruction if instructed else "", text)
        return CaptionRequest(seed, IDEA_TEMPERATURE, 1.0, IDEA_TOKENS, messages, idea=True)

    def then(self, request: CaptionRequest, answer: str) -> CaptionRequest | None:
        """The question after an answer; None if the answer is the caption."""
        return replace(self._about(answer, request.seed), subject="") if request.idea else None

    def _about(self, subject: str, seed: int) -> CaptionRequest:
        system, words = "", self._template
        if words is None:
            system, words = self.instruction, SUBJECT
            if not system:
                words = _INSTRUCTION if self.chat else _CONTINUED
        text = words.replace(SUBJECT, subject)
        options = (seed, self.temperature, self.top_p, self.max_tokens)
        if self.chat:
            return CaptionRequest(*options, _messages(system, text), subject=subject)
        return CaptionRequest(*options, prompt=text, subject=subject)


def _messages(system: str, text: str) -> tuple[tuple[str, str], ...]:
    return ((("system", system),) if system else ()) + (("user", text),)

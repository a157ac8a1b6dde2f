"""Reads calls of tools out of an answer's text while it grows: in Hermes's format or as JSON, of `contract.tools`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from api.text.events import CallBegin, CallDelta, Delta, TextDelta
from contract.text import TextJob
from contract.tools import CALLS, CallFormat

_HEAD = re.compile(  # no "<" in the name: pieces would end at an end tag in it, before this matches
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\<]|\\[^<\n])*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_BEGINNINGS = ('{"name"', '{"type"', '{"parameters"', '{"arguments"')
_SEPARATORS = " \t\r\n;,"  # between calls that are JSON
_IN_STRING, _OUTSIDE = re.compile(r'[\\"]'), re.compile(r'["{}\[\]]')  # characters that matter there
_MAX_HEAD = 512  # characters of a call up to its arguments
_MAX_HELD = 65_536  # of one in another order or form, which is read when it is whole
_MAX_SPACE = 512  # of white space before a call, which is dropped
_PORTION = 16_384  # that is read at once: what follows is copied for each call


@dataclass(slots=True)
class _Json:
    """Where the end of an object is, over pieces of it."""

    depth: int = 0
    in_string: bool = False
    escaped: bool = False

    def end(self, text: str) -> int | None:
        """The number of characters of `text` up to the object's end, if it is there."""
        at = 1 if self.escaped and text else 0
        self.escaped = self.escaped and not text
        while match := (_IN_STRING if self.in_string else _OUTSIDE).search(text, at):
            at, character = match.end(), match[0]
            if character == "\\":
                self.escaped = at == len(text)
                at += 1
            elif character == '"':
                self.in_string = not self.in_string
            else:
                self.depth += 1 if character in "{[" else -1
                if not self.depth:
                    return at
        return None


@dataclass(slots=True)
class ToolCallParser:
    """A choice's text: what of it is content, and its calls. What is no call after all is content.

    With `single` all that follows the first call is dropped.
    """

    syntax: CallFormat
    single: bool = False
    choice: int = 0
    calls: int = 0  # so far
    _has_content: bool = False
    _state: str = "text"  # then "head", "arguments" and "tail" of each call; or "rest", which has none
    _buffer: str = ""
    _before: str = ""  # white space and tag before a head
    _json: _Json = field(default_factory=_Json)
    _deltas: list[Delta] = field(default_factory=list)  # not yet returned

    @classmethod
    def of(cls, job: TextJob, choice: int) -> ToolCallParser | None:
        """The parser of a job's choice; None if it has no calls."""
        syntax = CALLS.get(job.tool_format or "") if job.tools else None
        return None if syntax is None else cls(syntax, job.parallel_tool_calls is False, choice)

    def feed(self, text: str) -> list[Delta]:
        """Add text; return what is known by now."""
        for at in range(0, len(text), _PORTION):
            self._buffer += text[at : at + _PORTION]
            while self._step():
                pass
        return self._take_deltas()

    def end(self) -> list[Delta]:
        """The end of the text: return what was held back."""
        if self._state == "head" and not self._read_whole(self._buffer):
            self._add_text(self._before + self._buffer)
        elif self._state in ("text", "rest") and (self._buffer.strip() or not self.calls):
            self._add_text(self._buffer)
        self._buffer = ""
        return self._take_deltas()

    def _take_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _step(self) -> bool:
        """Read on as far as the state goes; returns whether there may be more to read."""
        if self.single and self.calls and self._state in ("text", "rest"):
            self._buffer = ""
        if not self._buffer:
            return False
        return bool(getattr(self, f"_in_{self._state}")())

    def _in_text(self) -> bool:
        if not self.syntax.tag:
            return self._in_json_text()
        before, tag, after = self._buffer.partition(self.syntax.tag)
        kept = 0 if tag else _beginning(before, self.syntax.tag)
        text = before[: len(before) - kept]
        words = max(len(text.rstrip()), len(text) - _MAX_SPACE)
        self._add_text(text[:words])
        if tag:
            self._before, self._buffer, self._state = text[words:] + tag, after, "head"
        else:
            self._buffer = before[words:]
        return bool(tag)

    def _in_json_text(self) -> bool:
        text = self._buffer.lstrip(_SEPARATORS if self.calls else None)
        far = not self.calls and len(self._buffer) - len(text) > _MAX_SPACE
        if text or far:
            self._state = "head" if text.startswith("{") and not far else "rest"
        if self.calls:
            self._buffer = text
        return bool(text or far)

    def _in_rest(self) -> bool:
        self._add_text(self._buffer)
        self._buffer = ""
        return False

    def _in_head(self) -> bool:
        if match := _HEAD.match(self._buffer[:_MAX_HEAD]):
            self._begin_call(_name(match[1]))
            self._buffer, self._state, self._json = self._buffer[match.end() :], "arguments", _Json()
            return True
        most = self._most_held()
        if most and self.syntax.tag:
            call, end, after = self._buffer[:most].partition(self.syntax.end.strip())
            if end:
                if not self._read_whole(call):
                    self._add_text(self._before + call + end)
                self._buffer, self._state = after + self._buffer[most:], "text"
                return True
        if len(self._buffer) < most:
            return False
        if self.syntax.tag:
            self._add_text(self._before)
        self._state = "text" if self.syntax.tag else "rest"
        return True

    def _most_held(self) -> int:
        """The number of characters up to which what is held may become a call; 0 if it does not begin as one does."""
        start = re.sub(r"\s", "", self._buffer[:_MAX_HEAD])
        if not any(start[: len(word)] == word[: len(start)] for word in _BEGINNINGS):
            return 0
        return _MAX_HELD if self.syntax.tag or not start.startswith(_BEGINNINGS[:2]) else _MAX_HEAD

    def _in_arguments(self) -> bool:
        end = self._json.end(self._buffer)
        text = self._buffer[:end]
        self._add_arguments(text)
        self._buffer = self._buffer[len(text) :]
        if end is not None:
            self._state = "tail"
        return end is not None

    def _in_tail(self) -> bool:
        sought = self.syntax.end.strip() or "}"
        _, end, after = self._buffer.partition(sought)
        self._buffer = after if end else self._buffer[-len(sought) :]
        if end:
            self._state = "text"
        return bool(end)

    def _read_whole(self, text: str) -> bool:
        """Read a call whose members come in another order or form. False: it is none."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return False
        value = value if isinstance(value, dict) else {}
        arguments = value.get("arguments", value.get("parameters"))
        if not isinstance(value.get("name"), str) or not isinstance(arguments, dict | str | None):
            return False
        self._begin_call(_encodable(value["name"]))
        self._add_arguments(_encodable(arguments) if isinstance(arguments, str) else json.dumps(arguments or {}))
        return True

    def _add_text(self, text: str) -> None:
        if self.calls and not self._has_content:
            text = text.lstrip()
        if text:
            self._has_content = True
            self._deltas.append(TextDelta(self.choice, text))

    def _begin_call(self, name: str) -> None:
        self._deltas.append(CallBegin(self.choice, self.calls, name))
        self.calls += 1

    def _add_arguments(self, text: str) -> None:
        self._deltas.append(CallDelta(self.choice, self.calls - 1, text))


def _name(literal: str) -> str:
    try:
        return _encodable(json.loads(literal))
    except ValueError:
        return literal[1:-1]


def _encodable(text: str) -> str:
    """The text with "?" in place of lone surrogates, which escapes of JSON can write and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def _beginning(text: str, tag: str) -> int:
    """The number of characters at a text's end with which a tag may begin."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)

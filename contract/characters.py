"""Which text may come in: one rule for every door. Knows characters; knows nothing of what the text is for."""

from __future__ import annotations

import re

# Control characters but tab and line ends, and surrogates, which no UTF-8 file could hold.
_FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def complaint(text: str, max_characters: int) -> str | None:
    """What is wrong with it, in words that do not echo it; None if nothing is."""
    if len(text) > max_characters:
        return f"has {len(text)} characters, at most {max_characters} are allowed"
    found = _FORBIDDEN.search(text)
    if found is not None:
        code = f"U+{ord(found[0]):04X}"
        return f"character {found.start() + 1} is {code}, a control character or surrogate"
    return None

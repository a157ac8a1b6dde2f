"""A file that is read while a line is being written has the lines before it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.json_lines import whole_lines


def test_lines_are_read_whole_wherever_a_file_ends(tmp_path: Path) -> None:
    file, values = tmp_path / "lines", [{"event": "step"}, {"event": "naïve\u2028\n"}, {}]
    content = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values).encode()
    assert whole_lines(file) == []
    for end in range(len(content) + 1):
        file.write_bytes(content[:end])
        assert whole_lines(file) == values[: content[:end].count(b"\n")]

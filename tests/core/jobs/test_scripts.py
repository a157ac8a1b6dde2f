"""Every Lua file says what it takes and answers, and compiles in Redis behind what it includes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import redis

from core.jobs.rates import LIMITS
from core.jobs.scripts import load

ROOT = Path(__file__).resolve().parents[3]
LUA = ROOT / "core" / "jobs" / "lua"
FILES = sorted(str(path.relative_to(LUA).with_suffix("")) for path in LUA.rglob("*.lua"))
SCRIPTS = [name for name in FILES if not name.startswith("shared/")]


@pytest.mark.parametrize("name", FILES)
def test_a_file_begins_with_what_it_does(name: str) -> None:
    header = (LUA / f"{name}.lua").read_text("utf-8").split("\n\n")[0].splitlines()
    assert re.match(r"-- [A-Z]", header[0]) and all(line.startswith("--") for line in header)
    if name in SCRIPTS:
        assert [line.split()[1] for line in header if re.match(r"-- (KEYS|ARGV|Answer):", line)] == [
            "KEYS:", "ARGV:", "Answer:",
        ]  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_holds_what_it_includes_once_and_compiles(name: str, redis_url: str) -> None:
    text = load(name, LIMITS)
    defined = re.findall(r"^local function (\w+)", text, re.MULTILINE)
    assert len(defined) == len(set(defined))
    for function in set(re.findall(r"(?<![\w.:])([a-z_]+)\(", re.sub(r"--[^\n]*|'[^'\n]*'", "", text))):
        lua = {"tonumber", "ipairs", "unpack", "type", "and", "or", "not", "if", "while", "function", "in", "return"}
        assert function in lua or re.search(rf"\b(function {function}\b|local {function} = function\b)", text), function
    with redis.Redis.from_url(redis_url) as client:
        client.script_load(text)

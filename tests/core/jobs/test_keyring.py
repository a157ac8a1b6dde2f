"""API keys: only the whole token of a key that is there opens anything, and what is stored can be read again."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import time
from collections.abc import Iterator

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from core.jobs.connection import StoreDown, StoreFull
from core.jobs.keyring import SCOPES, AccessPolicy, ApiKey, Keyring, check, matching, most_queued, webhook_secret

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"
TOKEN = re.compile(r"dpt_[0-9a-f]{12}_[A-Za-z0-9_-]{43}")
ids = st.text("0123456789abcdef", min_size=12, max_size=12)
secrets = st.text(LETTERS, min_size=43, max_size=43)


@pytest.fixture
def keyring(redis_url: str) -> Iterator[Keyring]:
    keyring = Keyring(redis_url)
    yield keyring
    keyring.close()


def key_of(token: str) -> ApiKey:
    """A key as it is stored of this token: by the docs, SHA-256 of all of it."""
    return ApiKey(token[4:16], "someone", hashlib.sha256(token.encode()).hexdigest(), ("images",), "", "", 0)


def known(*tokens: str) -> dict[str, ApiKey]:
    return {key.id: key for key in map(key_of, tokens)}


@given(st.lists(ids, min_size=2, max_size=4, unique=True), st.lists(secrets, min_size=5, max_size=5, unique=True))
def test_a_token_opens_its_own_key_and_no_other_token_any(ids: list[str], secrets: list[str]) -> None:
    """Whatever has the form of a token: a known id with a secret that nobody has, or with another key's."""
    *own, unknown = secrets
    tokens = [f"dpt_{id}_{secret}" for id, secret in zip(ids, own, strict=False)]
    keys = known(*tokens)
    for id, token in zip(ids, tokens, strict=True):
        assert matching(token, keys) == keys[id]
        for secret in (unknown, *(other[-43:] for other in tokens if other != token)):
            assert matching(f"dpt_{id}_{secret}", keys) is None


@given(ids, secrets, st.integers(0, 42), st.sampled_from(LETTERS))
def test_every_character_of_the_secret_counts(id: str, secret: str, place: int, letter: str) -> None:
    token, wrong = f"dpt_{id}_{secret}", f"dpt_{id}_{secret[:place]}{letter}{secret[place + 1 :]}"
    found = matching(wrong, known(token))
    assert (found is not None) == (wrong == token)


def test_a_key_that_is_revoked_with_its_jobs_makes_none_for_a_day(keyring: Keyring, client: redis.Redis) -> None:
    """Longer than any API goes on with the keys that it has read; of one that keeps its jobs nothing is kept."""
    day_ms = 24 * 3600 * 1000
    for end in (True, False):
        key, _ = keyring.add("someone")
        assert keyring.revoke(key.id, end=end)
        left_ms = client.pttl(f"diptych:barred:{key.id}")
        assert day_ms - 60_000 < left_ms <= day_ms if end else left_ms == -2


def test_what_is_no_token_opens_nothing() -> None:
    token = "dpt_0123456789ab_" + "s" * 43
    keys = known(token)
    assert matching(token, keys) is not None
    wrong = (
        "", "dpt_", token[:-1], token + "s", token + "\n", " " + token, token.upper(), token[4:],
        keys[token[4:16]].hash, f"dpt_0123456789ab_{keys[token[4:16]].hash}"[:60],
    )  # fmt: skip
    for one in wrong:
        assert matching(one, keys) is None, one
    assert matching(token, {}) is None
    assert matching("dpt_ffffffffffff_" + "s" * 43, keys) is None, "another key's id under this secret"


def test_a_key_is_made_stored_and_revoked(keyring: Keyring, client: redis.Redis) -> None:
    before = int(time.time())
    first, token = keyring.add("me", SCOPES[::-1], "60/minute", "9/day", "25%", 10**9)
    second, other = keyring.add("you")
    assert TOKEN.fullmatch(token) and token != other and token[4:16] == first.id != second.id
    assert first == ApiKey(
        first.id, "me", hashlib.sha256(token.encode()).hexdigest(), SCOPES, "60/minute", "9/day", first.created,
        "25%", 10**9,
    )  # fmt: skip
    assert before <= first.created <= time.time()
    assert (second.scopes, second.rate, second.quota) == (("images", "text", "files"), "", ""), "not admin, unless said"
    stored = client.hgetall("diptych:keys")
    assert set(stored) == {first.id, second.id} and json.loads(stored[first.id])["hash"] == first.hash
    keys = {key.id: key for key in keyring.all()}
    assert keys == {first.id: first, second.id: second}
    assert matching(token, keys) == first and matching(other, keys) == second

    assert keyring.revoke(first.id) and not keyring.revoke(first.id)
    left = {key.id: key for key in keyring.all()}
    assert left == {second.id: second} and matching(token, left) is None and matching(other, left) == second


def test_all_are_told_oldest_first(keyring: Keyring, client: redis.Redis) -> None:
    keys = [ApiKey(f"{9 - n:012x}", f"n{n}", "0" * 64, ("text",), "", "", 100 + n // 2) for n in range(6)]
    for key in keys[::-1]:
        record = {name: getattr(key, name) for name in ("id", "name", "hash", "scopes", "rate", "quota", "created")}
        client.hset("diptych:keys", key.id, json.dumps({**record, "file_bytes": 0, "of": "a later version"}))
    assert keyring.all() == sorted(keys, key=lambda key: (key.created, key.id))


def test_what_no_key_means_outlives_the_last_one(keyring: Keyring, client: redis.Redis) -> None:
    assert keyring.guard() == AccessPolicy({}), "there never was one"
    first, _ = keyring.add("me")
    second, _ = keyring.add("you")
    assert keyring.guard() == AccessPolicy({first.id: first, second.id: second}) and not keyring.unlock()
    assert keyring.revoke(first.id) and keyring.guard() == AccessPolicy({second.id: second})
    assert keyring.revoke(second.id) and keyring.guard() == AccessPolicy({}, closed=True)
    assert not keyring.revoke(second.id) and keyring.guard().closed
    assert keyring.unlock() and keyring.guard() == AccessPolicy({}, open=True)
    assert not keyring.revoke(second.id) and keyring.guard().open, "what is not there closes nothing"
    third, _ = keyring.add("another")
    client.delete("diptych:access")  # as an older version leaves it
    assert keyring.revoke(third.id) and keyring.guard().closed


def test_on_a_full_redis_no_key_is_made_and_the_last_one_goes(keyring: Keyring, full: redis.Redis) -> None:
    key, _ = keyring.add("me")
    full.config_set("maxmemory", 1)
    with pytest.raises(StoreFull):
        keyring.add("you")
    assert keyring.revoke(key.id) and keyring.guard().closed and keyring.unlock() and keyring.guard().open


@pytest.mark.parametrize(
    ("share", "of", "most"),
    [("", 1000, 1000), ("25%", 1000, 250), ("1%", 10, 1), ("100%", 7, 7), ("9", 7, 7), ("3", 7, 3)],
)
def test_a_share_of_the_queue(share: str, of: int, most: int) -> None:
    assert most_queued(share, of) == most


@pytest.mark.parametrize("name", ["a", "A b.c_d@e-f", "x" * 64, "0"])
def test_names_that_may_be(name: str) -> None:
    check(name, ("text",), "1/second", "")


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        *(("name", name) for name in ("", " a", "-a", "x" * 65, "a\n", "a/b", "ä")),
        *(("scopes", scopes) for scopes in ((), ("root",), ("images", "root"))),
        *(("queued", share) for share in ("0", "0%", "101%", "50 %", "-1", "all")),
        *(("file_bytes", size) for size in (-1, 2**50 + 1)),
        ("checker", "allow"),
        *(
            (field, rate)
            for field in ("rate", "quota", "tokens")
            for rate in ("often", "0/minute ", "5", "5/", "5/year", "5/day, 6/day", "=5/day", "emoji-z=5")
        ),
        *(("jobs", most) for most in ("0", "50%", "1/day", "emoji-z=x")),
        *(("running", most) for most in ("0%", "101%", "some", "emoji-z=0")),
        *(("models", names) for names in (" ", ",", "a,,b", "a,\n", "a\x00", "x" * 500)),
    ],
)
def test_what_no_key_can_be_made_of(field: str, wrong: object, keyring: Keyring) -> None:
    good = {"name": "me", "scopes": SCOPES, "rate": "", "quota": ""}
    check(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"^{field}: "):
        keyring.add(**{**good, field: wrong})  # type: ignore[arg-type]
    assert keyring.all() == []


def test_the_secret_is_made_once_and_webhooks_are_signed_with_what_follows_from_it(
    keyring: Keyring, redis_url: str
) -> None:
    other = Keyring(redis_url)
    secret = keyring.secret()
    assert len(secret) == 32 and keyring.secret() == other.secret() == secret
    signing = hmac.new(secret, b"webhooks of abc", hashlib.sha256).digest()  # of Standard Webhooks: whsec_ and base64
    wanted = "whsec_" + base64.b64encode(signing).decode()
    assert keyring.webhook_secret("abc") == webhook_secret(secret, "abc") == wanted
    assert keyring.webhook_secret("abd") != keyring.webhook_secret("abc")
    other.close()


def test_without_redis_nobody_is_let_in() -> None:
    keyring = Keyring("redis://127.0.0.1:1/0")
    for call in (lambda: keyring.add("me"), keyring.all, lambda: keyring.revoke("0" * 12), keyring.secret):
        with pytest.raises(StoreDown):
            call()


def test_closed_it_holds_no_connection_and_may_be_used_again(redis_url: str, client: redis.Redis) -> None:
    keyring = Keyring(redis_url)
    keyring.add("me")
    others = {one["id"] for one in client.client_list()}
    keyring.close()
    until = time.monotonic() + 20  # Redis has to notice
    while len(left := {one["id"] for one in client.client_list()} & others) == len(others):
        assert time.monotonic() < until, left
        time.sleep(0.01)
    assert [key.name for key in keyring.all()] == ["me"]
    keyring.close()

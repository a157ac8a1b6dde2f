"""Predictions of several API keys: each sees its own, and has a secret of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.api.world import CARD, bearer, opened, settings_of, token_of


def test_keys_see_their_own(redis_url: str, tmp_path: Path) -> None:
    settings = settings_of(redis_url, tmp_path)
    ann, bob = (bearer(token_of(settings, name, ["images"])) for name in ("ann", "bob"))
    body: dict[str, Any] = {"version": "emoji-xl", "input": {"prompt": "a cat"}}
    with opened(settings, CARD) as (api, _):
        refused = api.client.post("/v1/predictions", json=body)
        assert (refused.status_code, refused.json()["title"]) == (401, "Unauthenticated")
        id = api.client.post("/v1/predictions", json=body, headers=ann).json()["id"]
        get = api.client.get
        assert get(f"/v1/predictions/{id}", headers=ann).status_code == 200
        assert get(f"/v1/predictions/{id}", headers=bob).status_code == 404
        assert [len(get("/v1/predictions", headers=key).json()["results"]) for key in (ann, bob)] == [1, 0]
        names = [get("/v1/account", headers=key).json()["username"] for key in (ann, bob)]
        secrets = [get("/v1/webhooks/default/secret", headers=key).json()["key"] for key in (ann, bob)]
        assert len(set(names)) == len(set(secrets)) == 2
        assert get("/v1/webhooks/default/secret").status_code == 401

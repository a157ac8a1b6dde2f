"""The published document of AUTOMATIC1111's routes, by schemathesis: whatever is asked is answered as it says."""

from __future__ import annotations

from tests.api.dialects.sdapi.studio import Studio
from tests.api.test_openapi import CASES, Document, walk
from tests.api.world import Api


def test_whatever_is_asked(shared: Api, studio: Studio) -> None:
    document = Document(shared.url)
    others = {label for label in document.operations if " /v1/" in label or " /v2/" in label}
    walk(document, CASES, without=others)
    document.session.close()
    assert {"GET /sdapi/v1/options", "POST /sdapi/v1/txt2img"} <= {label for label, _ in document.seen}

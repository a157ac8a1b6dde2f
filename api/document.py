"""Extends FastAPI's OpenAPI document: headers of all responses, and HEAD."""

from __future__ import annotations

from typing import Any

from api.dialects.predictions import inputs
from api.http import request_ids

_HEADERS = {
    request_ids.HEADER: {
        "description": "the request's `X-Request-ID` where it matches the pattern, else one that was made",
        "schema": {"type": "string", "pattern": f"^{request_ids.PATTERN}$"},
    },
    "Allow": {
        "description": "on a 405: every method that the address answers to",
        "schema": {"type": "string"},
    },
}
# Every GET answers HEAD too. It is documented for these: clients ask for size and ETag without the bytes.
_HEAD = ("/v1/jobs/{id}/images/{k}", "/v1/files/{id}/content")


def extend(document: dict[str, Any]) -> None:
    """Extend the document of all routes, in place."""
    document.setdefault("components", {})["headers"] = _HEADERS
    if "/predictions" in document["paths"]:  # Cog's clients read the schemas of input and output by these names
        document["components"].setdefault("schemas", {}).update(inputs.components())
    for path in _HEAD:
        document["paths"][path]["head"] = _head(document["paths"][path]["get"])
    for operations in document["paths"].values():
        for operation in operations.values():
            for status, response in operation["responses"].items():
                names = _HEADERS if status == "4XX" else (request_ids.HEADER,)
                references = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
                response["headers"] = {**response.get("headers", {}), **references}


def _head(get: dict[str, Any]) -> dict[str, Any]:
    """The HEAD operation of this GET: the same without bodies, and without a range."""
    head: dict[str, Any] = {name: get[name] for name in ("tags", "security") if name in get}
    parameters = [parameter for parameter in get.get("parameters", []) if parameter["name"] != "Range"]
    return {
        **head,
        "summary": f"{get['summary']}: the headers alone",
        "operationId": f"{get['operationId']}_head",
        "parameters": parameters,
        "responses": {
            status: {"description": response.get("description", "")}
            for status, response in get["responses"].items()
            if status != "206"
        },
    }

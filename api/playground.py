"""Serves the playground at / and the API reference at /docs: static files only, none from other hosts."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

from fastapi import Request, Response

from api.errors import ApiError
from api.routers import new_router

router = new_router(include_in_schema=False)

_FOLDER = Path(__file__).resolve().parent / "web"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_SWAGGER = find_spec("fastapi_swagger")  # located and not imported: only its files are needed
if _SWAGGER is None or _SWAGGER.origin is None:
    raise ImportError("No module named 'fastapi_swagger'", name="fastapi_swagger")
_UI = [Path(_SWAGGER.origin).parent / "resources" / name for name in ("swagger-ui-bundle.js", "swagger-ui.css")]
# Read once: no request path reaches the disk.
_FILES = {path.name: path.read_bytes() for path in (*sorted(_FOLDER.iterdir()), *_UI) if path.suffix in _TYPES}
_TAGS = {name: f'"{hashlib.sha256(data).hexdigest()[:32]}"' for name, data in _FILES.items()}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)


@router.get("/")
async def page(request: Request) -> Response:
    return _file("index.html", request)


@router.get("/docs")
async def docs(request: Request) -> Response:
    answer = _file("docs.html", request)
    answer.headers["Content-Security-Policy"] = _POLICY.replace("blob:", "data:")  # for Swagger UI's icons
    return answer


@router.get("/web/{name}")
async def part(name: str, request: Request) -> Response:
    return _file(name, request)


def _file(name: str, request: Request) -> Response:
    data = _FILES.get(name)
    if data is None:
        raise ApiError(404, "This endpoint does not exist.", code="not_found")
    headers = {
        "Cache-Control": "no-cache",  # revalidated: a page and its scripts must be of one version
        "ETag": _TAGS[name],
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    if _TAGS[name] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=_TYPES[Path(name).suffix], headers=headers)

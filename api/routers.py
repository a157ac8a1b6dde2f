"""Routers whose routes are complete as they are declared, so that an app takes them without building them again.

`FastAPI.include_router` builds each route of a router a second time, a third of a second at every start, and matches a
request router by router.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel

from api import schemas


def new_router(
    *tags: str,
    error: type[BaseModel] = schemas.Error,
    route_class: type[APIRoute] = APIRoute,
    include_in_schema: bool = True,
) -> APIRouter:
    """Create a router, with the form of its error responses."""
    responses: dict[int | str, dict[str, Any]] = {"4XX": {"model": error}, "5XX": {"model": error}}
    return APIRouter(tags=[*tags], route_class=route_class, responses=responses, include_in_schema=include_in_schema)


def add_routes(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    """Add the routes of `new_router`'s routers, in this order. They hold nothing of an app: several can have them."""
    for router in routers:
        app.router.routes.extend(router.routes)

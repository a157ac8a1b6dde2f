"""Code that the middlewares share."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Message, Send


def on_start(send: Send, act: Callable[[Message], object]) -> Send:
    """A `send` that calls `act` with the message that starts the response, before it is sent."""

    async def watched(message: Message) -> None:
        if message["type"] == "http.response.start":
            act(message)
        await send(message)

    return watched

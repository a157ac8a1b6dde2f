"""uvicorn's HTTP/1.1 by h11, with an answer of our form for what is no HTTP, and no second answer behind it."""

from __future__ import annotations

import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from api import request_ids
from api.errors import ApiError


class HttpProtocol(H11Protocol):
    """Ends a connection on which something comes that is no HTTP, such as a chunk without a size."""

    def send_400_response(self, msg: str) -> None:
        """Answer 400 where nothing has been answered yet, and close.

        A request whose body turned out to be none may be under way: its application is told that the client is gone,
        and whatever it still answers is dropped. uvicorn's own lets it answer, for which h11 has a LocalProtocolError.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = ApiError(400, "What came is no HTTP/1.1.", code="invalid_http")
            body = json.dumps(error.content).encode("ascii")
            headers = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
                request_ids.HEADER: request_ids.new(),
            }
            for event in (
                h11.Response(status_code=400, headers=list(headers.items()), reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

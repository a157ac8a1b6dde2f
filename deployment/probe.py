"""Health check of one part of a service: `python -m deployment.probe api | worker`.

Prints one line; exit code 0 if healthy, 1 if not. The API is healthy when it answers; a worker when its card says that
it is ready, or that it is draining. Changes nothing.
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
from collections.abc import Sequence

from core.config import Settings, SettingsError, read

_ANSWER_S = 5.0


def main(words: Sequence[str]) -> int:
    parts = {"api": api, "worker": worker}
    if len(words) != 1 or words[0] not in parts:
        print("usage: python -m deployment.probe api | worker")
        return 2
    try:
        well, result = parts[words[0]](read())
    except SettingsError as error:
        well, result = False, str(error)
    print(result)
    return 0 if well else 1


def api(settings: Settings) -> tuple[bool, str]:
    """Query the API of this machine. A response that is not Diptych's counts as none."""
    connection = http.client.HTTPConnection("127.0.0.1", settings.port, timeout=_ANSWER_S)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        body = answer.read(4096)
    except (OSError, http.client.HTTPException) as error:
        return False, f"the API does not answer ({type(error).__name__})"
    finally:
        connection.close()
    try:
        well = answer.status == 200 and json.loads(body) == {"status": "ok"}
    except ValueError:
        well = False
    return well, "ok" if well else f"the server on port {settings.port} is not Diptych's API"


def worker(settings: Settings) -> tuple[bool, str]:
    """Check the cards of this machine's workers: one ready worker is enough, as with one worker per device."""
    from core.jobs.connection import StoreError
    from core.jobs.registry import Registry

    try:
        registry = Registry.of(settings)
    except ValueError:
        return False, "DIPTYCH_REDIS_URL: is not a Redis URL"
    try:
        cards = [card for card in registry.workers() if card.host == socket.gethostname()]
    except StoreError as error:
        return False, str(error)
    finally:
        registry.close()
    states = {card.state for card in cards}
    if states & {"ready", "draining"}:
        return True, ", ".join(sorted(states))
    return False, next((f"{card.state}: {card.message}" for card in cards), "no worker has announced itself")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`diptych models`: lists the models of a running service, or what would be loaded without one."""

from __future__ import annotations

import argparse
import json
from typing import Any

from cli.arguments import CommandFailed, Commands, UsageError, read_settings

_ANSWER_S = 10.0


def add(commands: Commands) -> None:
    models = commands.add_parser(
        "models",
        help="list models",
        description="What a running service offers; where none answers, the model that one started here would load.",
    )
    models.add_argument("--url", metavar="URL", help="of the service; default: the one that `diptych serve` has here")
    models.set_defaults(run=_models)


def _models(options: argparse.Namespace) -> int:
    settings = read_settings(options)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{settings.port}" if options.url is None else options.url
    try:
        offered = _ask(url.rstrip("/") + "/v1/models")
    except OSError as error:
        if options.url is not None:
            raise CommandFailed(f"--url: no service answers ({getattr(error, 'reason', error)})") from error
        print(f"{settings.model_name}  (would be loaded here; no service answers at {url})")
        return 0
    for model in offered:
        card = model["diptych"]
        state = "" if card["live"] else "  (not live)"
        size = card["native_size"] if card["modality"] == "image" else f"{card['limits']['context']} tokens"
        what = ", ".join((card["modality"], f"{card['precision']} on {card['device']}", size))
        print(f"{model['id']}  {what}{state}")
    return 0


def _ask(url: str) -> list[dict[str, Any]]:
    """Raises OSError if no server answers, `UsageError` if the server is not Diptych."""
    import http.client
    import urllib.request

    if not url.startswith(("http://", "https://")):
        raise UsageError("--url: must begin with http:// or https://")
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
            data: list[dict[str, Any]] = json.loads(answer.read())["data"]
        if all("diptych" in model for model in data):
            return data
    except (http.client.HTTPException, ValueError, KeyError, TypeError):
        pass
    raise UsageError("--url: the server there is not Diptych")

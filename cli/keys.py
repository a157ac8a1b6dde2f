"""`diptych keys add | list | revoke | webhook`: the API keys of a service, in the Redis that it uses.

Knows options and where that Redis is; what a key is, core.jobs.keyring knows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cli.arguments import Commands, Failure, UsageError, read_settings

if TYPE_CHECKING:
    from core.jobs.keyring import Keyring

T = TypeVar("T")

_ABOUT = """Without any key a service serves its own machine alone; from the first one on, every caller must bring one.
`diptych serve` with a Redis of its own must be running. Elsewhere set DIPTYCH_REDIS_URL as for the service.

exit codes: 0 done; 1 Redis does not answer, or there is no such key; 2 the input cannot be used, and is named
"""


def add(commands: Commands) -> None:
    keys = commands.add_parser(
        "keys", help="who may use the service", description="API keys: made, listed, revoked.", epilog=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    verbs = keys.add_subparsers(required=True, metavar="VERB")
    new = verbs.add_parser("add", help="make a key", description="Make a key, and print it this once.")
    new.add_argument("name", metavar="NAME", help="whose it is")
    new.add_argument("--scopes", default="images,text", metavar="WORD,…", help="of images, text, admin; %(default)s")
    new.add_argument("--rate", default="", metavar="N/TIME", help="requests, as 60/minute; default: DIPTYCH_RATE")
    new.add_argument("--quota", default="", metavar="N/TIME", help="pictures, as 1000/day; default: DIPTYCH_QUOTA")
    new.set_defaults(run=_add)
    verbs.add_parser("list", help="list keys", description="Every key, oldest first.").set_defaults(run=_list)
    gone = verbs.add_parser("revoke", help="take a key away", description="Take a key away, within two seconds.")
    gone.add_argument("id", metavar="ID", help="as `keys list` has it")
    gone.set_defaults(run=_revoke)
    told = verbs.add_parser("webhook", help="how webhooks are signed", description="The secret of a key's webhooks.")
    told.add_argument("id", nargs="?", default="", metavar="ID", help="of a key; none: of jobs made without keys")
    told.set_defaults(run=_webhook)
    for verb in verbs.choices.values():
        verb.add_argument("--data", dest="data_dir", type=Path, metavar="DIR", help="of the `diptych serve` here")


def _add(options: argparse.Namespace) -> int:
    from core.jobs.keyring import check

    scopes = [word.strip() for word in options.scopes.split(",") if word.strip()]
    try:
        check(options.name, scopes, options.rate, options.quota)
    except ValueError as error:
        field, _, words = str(error).partition(": ")
        raise UsageError(f"{'NAME' if field == 'name' else '--' + field}: {words}") from error

    def make(keyring: Keyring) -> None:
        key, token = keyring.add(options.name, scopes, options.rate, options.quota)
        print(f"{token}\n\n{key.name} ({key.id}) may use it as Authorization: Bearer …, from now on.")
        print("It is not kept and not shown again.")

    _with_keyring(options, make)
    return 0


def _list(options: argparse.Namespace) -> int:
    for key in _with_keyring(options, lambda keyring: keyring.all()):
        made = time.strftime("%Y-%m-%d", time.gmtime(key.created))
        limits = ", ".join(f"{what} {rate}" for what, rate in (("rate", key.rate), ("quota", key.quota)) if rate)
        print(f"{key.id}  {key.name}  {','.join(key.scopes)}  {made}" + (f"  {limits}" if limits else ""))
    return 0


def _revoke(options: argparse.Namespace) -> int:
    if not _with_keyring(options, lambda keyring: keyring.revoke(options.id)):
        raise Failure("ID: there is no such key; see `diptych keys list`")
    print("revoked")
    return 0


def _webhook(options: argparse.Namespace) -> int:
    def tell(keyring: Keyring) -> str:
        if options.id and options.id not in {key.id for key in keyring.all()}:
            raise Failure("ID: there is no such key; see `diptych keys list`")
        return keyring.webhook_secret(options.id)

    print(_with_keyring(options, tell))
    return 0


def _with_keyring(options: argparse.Namespace, use: Callable[[Keyring], T]) -> T:
    """What `use` returns of the keyring of the service that the settings name, or that runs on this data folder."""
    from core.jobs.connection import StoreError
    from core.jobs.keyring import Keyring
    from deployment.redis import address_in

    settings = read_settings(options)
    url = settings.redis_url or address_in(settings.data_dir.expanduser() / "redis")
    if not url:
        raise Failure(f"no `diptych serve` runs on {settings.data_dir}; start it, or set DIPTYCH_REDIS_URL")
    try:
        keyring = Keyring(url)
    except ValueError as error:
        raise UsageError("DIPTYCH_REDIS_URL: is no address of a Redis") from error
    try:
        return use(keyring)
    except StoreError as error:
        raise Failure(str(error)) from error
    finally:
        keyring.close()

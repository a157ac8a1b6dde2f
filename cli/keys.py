"""`diptych keys add | list | revoke | open | webhook`: manages a service's API keys in its Redis."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cli.arguments import CommandFailed, Commands, UsageError, add_command, read_settings, wrong_option
from contract.content import ACTIONS

if TYPE_CHECKING:
    from core.config import Settings
    from core.jobs.keyring import Keyring

T = TypeVar("T")

_ID = re.compile(r"[0-9a-f]{12}")
_ABOUT = """Before its first key a service serves its own machine alone; from that one on, every caller must bring one.
After the last one is revoked nobody is served, until there is another or `diptych keys open` asks for none again.
`diptych serve` with a Redis of its own must be running. Elsewhere set DIPTYCH_REDIS_URL as for the service.

exit codes: 0 done; 1 Redis does not answer, or there is no such key; 2 the input cannot be used, and is named
"""


def add(commands: Commands) -> None:
    keys = add_command(commands, "keys", "who may use the service", "API keys: made, listed, revoked.", _ABOUT)
    verbs = keys.add_subparsers(required=True, metavar="VERB")
    new = verbs.add_parser("add", help="make a key", description="Make a key, and print it this once.")
    new.add_argument("name", metavar="NAME", help="whose it is")
    new.add_argument(
        "--scopes", default="images,text,files", metavar="WORD,…", help="of images, text, files, admin; %(default)s"
    )
    new.add_argument(
        "--models", default="", metavar="NAME,…", help="that it may use; others are hidden from it; default: all"
    )
    new.add_argument(
        "--rate", default="", metavar="N/TIME", help="requests, as 60/minute, or with limits of one model besides "
        "60/minute,emoji-z=10/minute; default: DIPTYCH_RATE",
    )  # fmt: skip
    new.add_argument("--quota", default="", metavar="N/TIME", help="pictures, as 1000/day; default: DIPTYCH_QUOTA")
    new.add_argument(
        "--tokens", default="", metavar="N/TIME", help="of texts, as 100000/minute; default: DIPTYCH_TOKENS"
    )
    new.add_argument(
        "--jobs",
        default="",
        metavar="N",
        help="queued or running, as 50,emoji-z=4; default: DIPTYCH_KEY_JOBS",
    )
    new.add_argument(
        "--running", default="", metavar="N|N%", help="of a model's jobs at its workers, as 8 or 50%%,emoji-z=2; "
        "default: DIPTYCH_KEY_RUNNING",
    )  # fmt: skip
    new.add_argument(
        "--queued", default="", metavar="N|N%", help="of its jobs may wait in a queue; default: DIPTYCH_KEY_QUEUED"
    )
    new.add_argument(
        "--file-bytes", type=_bytes, default=0, metavar="N", help="that its files may take, as 500MiB or 10GiB"
    )
    new.add_argument(
        "--checker", choices=ACTIONS, default="", metavar="WORD",
        help="what is done to its pictures that the checker flags: off, tag, blur or refuse, stricter or laxer than "
        "DIPTYCH_CHECKER_ACTION, the default",
    )  # fmt: skip
    new.set_defaults(run=_add)
    verbs.add_parser("list", help="list keys", description="Every key, oldest first.").set_defaults(run=_list)
    gone = verbs.add_parser("revoke", help="take a key away", description="Take a key away, within two seconds.")
    gone.add_argument("id", metavar="ID", help="as `keys list` has it")
    group = gone.add_mutually_exclusive_group()
    group.add_argument("--keep-jobs", action="store_true", help="let its jobs and batches go on; as if nothing is said")
    group.add_argument(
        "--cancel-jobs", action="store_true", help="cancel its jobs and batches, and erase them, its files and pictures"
    )
    gone.set_defaults(run=_revoke)
    verbs.add_parser(
        "open", help="ask for no key", description="Serve without keys again, after the last one was revoked."
    ).set_defaults(run=_open)
    webhook = verbs.add_parser("webhook", help="how webhooks are signed", description="The secret of a key's webhooks.")
    webhook.add_argument("id", nargs="?", default="", metavar="ID", help="of a key; none: of jobs made without keys")
    webhook.set_defaults(run=_webhook)
    for verb in verbs.choices.values():
        verb.add_argument("--data", dest="data_dir", type=Path, metavar="DIR", help="of the `diptych serve` here")


def _add(options: argparse.Namespace) -> int:
    from contract.errors import Invalid
    from core.jobs.keyring import check

    scopes = [word.strip() for word in options.scopes.split(",") if word.strip()]
    limits = (options.rate, options.quota, options.queued, options.file_bytes, options.checker)
    more = {name: getattr(options, name) for name in ("tokens", "jobs", "running", "models")}
    try:
        check(options.name, scopes, *limits, **more)
    except Invalid as error:
        raise wrong_option(error, {"name": "NAME"}) from error

    def make(keyring: Keyring) -> None:
        key, token = keyring.add(options.name, scopes, *limits, **more)
        print(f"{token}\n\n{key.name} ({key.id}) may use it as Authorization: Bearer …, from now on.")
        print("It is not kept and not shown again.")

    _with_keyring(options, make)
    return 0


def _list(options: argparse.Namespace) -> int:
    keys = _with_keyring(options, lambda keyring: keyring.all())
    if not keys:
        print("there are no keys", file=sys.stderr)
    for key in keys:
        created = time.strftime("%Y-%m-%d", time.gmtime(key.created))
        bounds = {
            "models": key.models, "rate": key.rate, "quota": key.quota, "tokens": key.tokens, "jobs": key.jobs,
            "running": key.running, "queued": key.queued, "file bytes": key.file_bytes, "checker": key.checker,
        }  # fmt: skip
        limits = ", ".join(f"{limit} {value}" for limit, value in bounds.items() if value)
        print(f"{key.id}  {key.name}  {','.join(key.scopes)}  {created}" + (f"  {limits}" if limits else ""))
    return 0


def _revoke(options: argparse.Namespace) -> int:
    """Revoke a key, also one that is gone already: its jobs may be left from an interrupted call."""

    def take(keyring: Keyring) -> tuple[bool, bool]:
        return keyring.revoke(options.id, end=options.cancel_jobs), keyring.guard().closed

    revoked, closed = _with_keyring(options, take)
    if not revoked and not (options.cancel_jobs and _ID.fullmatch(options.id)):
        raise CommandFailed("ID: there is no such key; see `diptych keys list`")
    print("revoked" if revoked else "it was revoked before")
    _follow_up(options)
    if closed:
        print("That was the last key. Nobody is served now, on this machine neither, until you make another")
        print("(diptych keys add NAME) or say that no key is asked for (diptych keys open).")
    return 0


def _follow_up(options: argparse.Namespace) -> None:
    """Cancel the revoked key's jobs, or print that they continue."""
    from core.jobs.batches import BatchStore
    from core.jobs.connection import RedisClient, StoreError
    from core.jobs.store import JobStore
    from core.jobs.tenants import TenantRecords, cancel_all, usage

    settings = read_settings(options)
    named = settings.model_copy(update={"redis_url": _url(settings)})
    client = RedisClient(named.redis_url)
    store, batches = JobStore.of(named, client), BatchStore.of(named, client)
    try:
        answer = (cancel_all if options.cancel_jobs else usage)(store, batches, options.id)
        erased = TenantRecords(client).erase(store, options.id) if options.cancel_jobs else None
    except StoreError as error:
        raise CommandFailed(f"the key is revoked; its jobs are not looked at: {error}") from error
    finally:
        client.close()
    if options.cancel_jobs:
        print(f"cancelled: {answer.jobs} jobs, {answer.batches} batches")
    if erased is not None:
        print(
            f"erased: {erased.jobs} jobs, {erased.batches} batches and {erased.files} files, with their pictures; "
            f"about {erased.store_bytes / 2**20:.1f} MiB of Redis and {erased.file_bytes / 2**20:.1f} MiB of files"
        )
    elif answer.jobs or answer.batches:
        print(f"{answer.jobs} jobs and {answer.batches} batches of it go on; --cancel-jobs ends them")


def _open(options: argparse.Namespace) -> int:
    if not _with_keyring(options, lambda keyring: keyring.unlock()):
        raise CommandFailed("keys exist, so one is required; see `diptych keys list`")
    print("No key is required: only this machine is served, or any client with DIPTYCH_TRUST_NETWORK set.")
    return 0


def _webhook(options: argparse.Namespace) -> int:
    def tell(keyring: Keyring) -> str:
        if options.id and options.id not in {key.id for key in keyring.all()}:
            raise CommandFailed("ID: there is no such key; see `diptych keys list`")
        return keyring.webhook_secret(options.id)

    print(_with_keyring(options, tell))
    return 0


def _with_keyring(options: argparse.Namespace, use: Callable[[Keyring], T]) -> T:
    """Call `use` with the keyring of the configured service, or of the one that runs on this data folder."""
    from core.jobs.connection import StoreError
    from core.jobs.keyring import Keyring

    url = _url(read_settings(options))
    try:
        keyring = Keyring(url)
    except ValueError as error:
        raise UsageError("DIPTYCH_REDIS_URL: is not a Redis URL") from error
    try:
        return use(keyring)
    except StoreError as error:
        raise CommandFailed(str(error)) from error
    finally:
        keyring.close()


def _url(settings: Settings) -> str:
    """URL of the configured Redis, or of the one that runs on the data folder."""
    from deployment.redis import address_in

    url = settings.redis_url or address_in(settings.data_dir.expanduser() / "redis")
    if not url:
        raise CommandFailed(f"no `diptych serve` runs on {settings.data_dir}; start it, or set DIPTYCH_REDIS_URL")
    return url


def _bytes(text: str) -> int:
    """Parse a number of bytes with an optional unit. Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,15})(B|KiB|MiB|GiB|TiB)?", text)
    if match is None:
        raise argparse.ArgumentTypeError("must look like 500MiB or 10GiB")
    return int(match[1]) << 10 * ("B", "KiB", "MiB", "GiB", "TiB").index(match[2] or "B")

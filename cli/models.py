"""`diptych models`: lists the models of a running service, or those there are without one; `models list`, `models add`
and `models remove` are about those on this machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cli import quantize
from cli.arguments import (
    CommandFailed,
    Commands,
    StartupProgress,
    UsageError,
    add_command,
    check_range,
    model_errors,
    read_settings,
)
from cli.convert import add_checkpoint, checkpoint_options
from contract.card import is_placeholder
from contract.precision import IMAGE_SCHEMES
from contract.printable import printable
from core.config import EMBEDDED_MODEL, EMBEDDED_TEXT_MODEL

_ANSWER_S = 10.0
_GIB = 2**30
_ABOUT = """SOURCE is a checkpoint of SDXL or Stable Diffusion 1 in one .safetensors file, its https address, a
folder or a hub id, or the name of a model that is offered beside the wheel (`diptych models list`).
The model then goes by its name:

  diptych models add juggernautXL.safetensors --name juggernaut --quantize int8
  diptych serve --model juggernaut

A download that broke goes on where it was when the command is given again.
"""


def add(commands: Commands) -> None:
    models = commands.add_parser(
        "models",
        help="list models",
        description="What a running service offers; where none answers, the model that one started here would load.",
    )
    models.add_argument("--url", metavar="URL", help="of the service; default: the one that `diptych serve` has here")
    models.set_defaults(run=_models)
    verbs = models.add_subparsers(metavar="VERB")
    adding = add_command(
        verbs,
        "add",
        "add a model, found by its name from then on",
        "Put a model into DIPTYCH_MODELS_DIR, converted and quantized as asked.",
        _ABOUT,
    )
    adding.add_argument(
        "source", metavar="SOURCE", help="a file, its https address, a folder, a hub id, or an offered name"
    )
    adding.add_argument("--name", default="", metavar="N", help="of the model; default: the file's or folder's own")
    adding.add_argument("--sha256", default="", metavar="HEX", help="that the file must have")
    adding.add_argument("--variant", metavar="WORD", help="of a folder's weight files, such as fp16")
    adding.add_argument("--max-gib", type=float, default=20, metavar="X", help="of a download; default: %(default)s")
    add_checkpoint(adding)
    adding.add_argument(
        "--quantize", choices=IMAGE_SCHEMES, metavar="SCHEME", help=f"make a variant: {', '.join(IMAGE_SCHEMES)}"
    )
    adding.add_argument("--limit", type=int, metavar="N", help="prompts to calibrate on; default: 64")
    adding.add_argument("--threads", type=int, metavar="N", help="CPU threads of --quantize; default: one per core")
    adding.set_defaults(run=_add)
    listing = verbs.add_parser("list", help="list the models on this machine", description="Embedded and added models.")
    listing.set_defaults(run=_list)
    removing = verbs.add_parser(
        "remove",
        help="delete an added model",
        description="Delete a model from DIPTYCH_MODELS_DIR. A running service keeps what it has loaded.",
    )
    removing.add_argument("name", metavar="NAME", help="of an added model")
    removing.set_defaults(run=_remove)


def _models(options: argparse.Namespace) -> int:
    from deployment.address import url_in

    settings = read_settings(options)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    here = url_in(settings.data_dir) or f"http://{host}:{settings.port}"
    url = here if options.url is None else options.url
    try:
        offered = _ask(url.rstrip("/") + "/v1/models")
    except OSError as error:
        if options.url is not None:
            raise CommandFailed(f"--url: no service answers ({getattr(error, 'reason', error)})") from error
        print(f"{settings.model_name}  (would be loaded here; no service answers at {url})")
        _print_added(settings.model_stores)
        return 0
    for model in offered:
        card = model["diptych"]
        if is_placeholder(card):
            print(printable(f"{model['id']}  {card['modality']}  (being loaded)"))
            continue
        state = "" if card["live"] else "  (not live)"
        size = card["native_size"] if card["modality"] == "image" else f"{card['limits']['context']} tokens"
        columns = ", ".join((card["modality"], f"{card['precision']} on {card['device']}", size))
        print(printable(f"{model['id']}  {columns}{state}"))
    return 0


def _print_added(stores: Iterable[Path]) -> None:
    from pipeline.checkpoints.model_store import names

    folders = {name: store / name for store in reversed([*stores]) for name in names(store)}
    for name, folder in sorted(folders.items()):
        if (folder / "model_index.json").is_file():
            print(f"{name}  (added; {_facts(folder)}; --model {name} loads it)")
        elif (folder / "config.json").is_file():
            print(f"{name}  (added; text, {_size(folder)}; --text-model {name} loads it)")
        else:
            print(f"{name}  (added; a folder of adapters: {folder})")


def _facts(folder: Path) -> str:
    """An image model's family, size, and the schemes that it has a quantized variant in."""
    from pipeline.checkpoints.folder import ModelError
    from pipeline.families import registry

    try:
        family = registry.read(folder)
    except ModelError:
        return _size(folder)
    # As `pipeline.quantization.quantized_parts` lays them out, which imports torch.
    variants = [scheme for scheme in IMAGE_SCHEMES if (folder / f"{family.quantized[0]}-{scheme}").is_dir()]
    return ", ".join([family.label, _size(folder), *variants])


def _size(folder: Path) -> str:
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{total / 1e9:.1f} GB" if total >= 1e9 else f"{total / 1e6:.0f} MB"


def _list(options: argparse.Namespace) -> int:
    from pipeline.checkpoints import release_assets

    for name in _embedded():
        print(f"{name}  (embedded; {_facts(EMBEDDED_MODEL.parent / name)}; --model {name} loads it)")
    text = EMBEDDED_TEXT_MODEL.name
    if (EMBEDDED_TEXT_MODEL / "model.safetensors").is_file():
        print(
            f"{text}  (embedded; text, {_size(EMBEDDED_TEXT_MODEL)}; DIPTYCH_TEXT_MODEL, unless it is off or another)"
        )
    stores = read_settings(options).model_stores
    _print_added(stores)
    for asset in release_assets.listed().values():
        if not any((store / asset.name).exists() for store in stores):
            print(f"{asset.name}  (not installed; {asset.remedy}, {asset.size_bytes / 1e6:.0f} MB)")
    return 0


def _embedded() -> list[str]:
    """The names of the image models that come with the package."""
    return sorted(path.parent.name for path in EMBEDDED_MODEL.parent.glob("*/model_index.json"))


def _remove(options: argparse.Namespace) -> int:
    from pipeline.checkpoints import model_store

    stores = read_settings(options).model_stores
    store = next((store for store in stores if options.name in model_store.names(store)), stores[0])
    embedded = {path.name for path in EMBEDDED_MODEL.parent.glob("*")}
    if options.name in embedded and options.name not in model_store.names(store):
        raise UsageError(f"NAME: {options.name} is embedded: it is part of the package, and goes with it")
    with model_errors():
        model_store.remove(options.name, store)
    print(f"removed {store / options.name}")
    return 0


def _add(options: argparse.Namespace) -> int:
    from rich.console import Console

    settings = read_settings(argparse.Namespace(threads=options.threads))
    if not 0 < options.max_gib < 1024:
        raise UsageError(f"--max-gib: must be more than 0 and less than 1024, not {options.max_gib:g}")
    check_range(options, "limit", 1)
    with model_errors(), StartupProgress(Console(stderr=True)) as starting:
        from pipeline.checkpoints import model_store

        added = model_store.add(
            options.source,
            settings.model_stores[0],
            model_store.AddOptions(
                checkpoint_options(options),
                int(options.max_gib * _GIB),
                options.name,
                options.sha256,
                options.variant,
                lambda name: (EMBEDDED_MODEL.parent / name).exists(),
                starting.say,
                starting.count,
            ),
        )
    print(added.folder, flush=True)
    if added.sha256:
        print(f"sha256 {added.sha256}", flush=True)
    if options.quantize is not None:
        quantize.into_own_folder(added.folder, options.quantize, options.variant, options.limit, options.threads)
    if (added.folder / "model_index.json").is_file():
        print(f"diptych serve --model {added.folder.name}")
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

"""`diptych tune-kernels`: measures the tiles of matrix products on this machine's GPU, once, and keeps the best."""

from __future__ import annotations

import argparse
from pathlib import Path

from cli.arguments import CommandFailed, Commands, UsageError, add_command, create_cache_folder, read_settings

_ABOUT = """An 8-bit product runs in tiles whose best shape depends on the card. Tables for some cards come with
Diptych; a card without one takes that of a card with as many multiprocessors, or an estimate. This command measures all
tiles at the shapes of the models, in minutes, with nothing else on the GPU. Workers of this machine use its table from
their next start on; no bit of any picture changes. Offer the file to the project, so that others need not measure.

  diptych tune-kernels
  diptych tune-kernels --models sdxl -o nvidia_h100.json

exit codes: 0 measured and kept; 1 no GPU that these kernels run on; 2 the input cannot be used, and is named
"""


def add(commands: Commands) -> None:
    tune = add_command(
        commands,
        "tune-kernels",
        "measure the tiles of this machine's GPU",
        "Measure the tiles of matrix products on this machine's GPU, and keep the best for its workers.",
        _ABOUT,
    )
    tune.add_argument("--models", default="sdxl,zimage", metavar="NAME,…", help="whose shapes; default: %(default)s")
    tune.add_argument("-o", "--out", type=Path, metavar="FILE", help="default: in the cache folder, for its workers")
    tune.set_defaults(run=_tune)


def _tune(options: argparse.Namespace) -> int:
    settings = read_settings(options)
    create_cache_folder(settings)
    import torch

    from core.kernels.cuda import driver, tiles
    from lab.bench import kernels
    from workers.devices import keep_compiled

    models = [name.strip() for name in options.models.split(",") if name.strip()]
    if not models or (unknown := [name for name in models if name not in kernels.TILED]):
        raise UsageError(f"--models: {unknown[0] if models else 'none'} is none of {', '.join(kernels.TILED)}")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if (reason := driver.unsupported_reason(device)) is not None:
        raise CommandFailed(f"nothing to measure: {reason}")
    keep_compiled(settings, str(device))
    name = torch.cuda.get_device_name(device)
    path = options.out or tiles.path_of(settings.measured_tiles, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        kernels.tune(models, path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error
    print(f"tiles of {name}: {path}", flush=True)
    return 0

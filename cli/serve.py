"""`diptych serve | api | worker`: the whole service from one command, or one part of it.

`serve` and `api` load no torch: a machine that only runs the API does not need it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cli.arguments import (
    FOLDERS,
    CommandFailed,
    Commands,
    UsageError,
    add_command,
    add_model,
    add_plan,
    add_settings,
    create_cache_folder,
    model_errors,
    read_settings,
)
from contract.printable import printable_message
from core.extras import pip_install

if TYPE_CHECKING:
    from core.config import Settings

_NEEDED = ("celery", "fastapi", "limits", "obstore", "prometheus_client", "redis", "uvicorn")  # the extra `serve`
_PARTS = """One machine runs `diptych serve`, which needs no other part. On several machines, let each have the same
DIPTYCH_REDIS_URL and DIPTYCH_ARTIFACTS_URL (a folder that all of them see, or s3://…), and run `diptych api` and
`diptych worker` as often as there is something to do.

exit codes: 0 stopped; 2 the input cannot be used, and is named; 130 stopped with Ctrl-C
"""
_SUCH_AS = "such as redis://:password@host:6379/0"
_CATALOGUE = ("models", "models_mib", "models_host_mib", "model_idle_s", "text_models", "text_models_mib")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0


def add(commands: Commands) -> None:
    serve = add_command(
        commands,
        "serve",
        "serve pictures over HTTP",
        "Redis, the API and a worker, started and kept alive by this one command.",
        _PARTS,
    )
    add_settings(serve, "host", "port", "apis", "sdapi")
    serve.add_argument("--each-gpu", action="store_true", help="one worker for each GPU of this machine")
    serve.add_argument(
        "--data",
        "--data-dir",
        dest="data_dir",
        type=Path,
        metavar="DIR",
        help="for pictures and what is queued; default: ~/.local/share/diptych",
    )
    add_model(serve)
    add_settings(serve, *_CATALOGUE, *FOLDERS)
    add_plan(serve)
    serve.set_defaults(run=_serve)

    api = add_command(commands, "api", "the API alone", "Answers HTTP. Needs DIPTYCH_REDIS_URL.", _PARTS)
    add_settings(api, "host", "port", "sdapi")
    api.add_argument("--fd", type=int, help=argparse.SUPPRESS)  # a listening socket inherited from `serve`
    api.set_defaults(run=_api)

    worker = add_command(
        commands, "worker", "a worker alone", "Draws what is queued, on one device. Needs DIPTYCH_REDIS_URL.", _PARTS
    )
    worker.add_argument("--each-gpu", action="store_true", help="one worker for each GPU of this machine")
    add_model(worker)
    add_settings(worker, *_CATALOGUE, *FOLDERS)
    add_plan(worker)
    worker.set_defaults(run=_worker)


def _serve(options: argparse.Namespace) -> int:
    _check_extra()
    from deployment.address import AddressError
    from deployment.devices import NoDevices, visible_gpus
    from deployment.redis_programs import RedisError
    from deployment.serve import DataError, serve

    settings = read_settings(options)
    if settings.redis_url:
        _check_redis(settings)
    try:
        devices = visible_gpus(os.environ) if options.each_gpu else None
        return serve(settings, devices=devices, verbose=options.verbose)
    except NoDevices as error:
        raise UsageError(f"--each-gpu: {error}") from error
    except (AddressError, DataError) as error:
        raise UsageError(str(error)) from error
    except RedisError as error:
        raise CommandFailed(str(error)) from error


def _api(options: argparse.Namespace) -> int:
    _check_extra()
    settings = read_settings(options)
    _check_redis(settings)
    from api.app import serve
    from core.artifacts import ArtifactError
    from core.logs import configure

    configure(settings.log_format)
    _begin_traces(settings, "diptych-api")
    try:
        serve(settings, options.fd)
    except ArtifactError as error:
        raise UsageError(f"DIPTYCH_ARTIFACTS_URL: {error}") from error
    return 0


def _worker(options: argparse.Namespace) -> int:
    _check_extra()
    settings = read_settings(options)
    _check_redis(settings)
    create_cache_folder(settings)
    if options.each_gpu:
        return _each_gpu(settings, options)
    _limit_threads(settings)
    _wait_for_redis(settings)
    from core.logs import configure
    from workers.boot import run

    configure(settings.log_format)
    _begin_traces(settings, "diptych-worker")
    with model_errors():
        return int(run(settings) or 0)


def _limit_threads(settings: Settings) -> None:
    """Limit the threads of a GPU worker's libraries, before any of them is loaded, and keep it near its GPU."""
    from core.threads import compute_threads, limit_threads, stay_on
    from deployment.devices import expects_gpu, gpu_of, near_cores

    if expects_gpu(settings.device, os.environ):
        limit_threads(os.environ, compute_threads(settings.threads, gpu=True))
        stay_on(near_cores(gpu_of(settings.device, os.environ)))


def _each_gpu(settings: Settings, options: argparse.Namespace) -> int:
    from deployment.devices import NoDevices, serve_each

    words = [sys.executable, "-P", "-m", "cli", *(["--verbose"] if options.verbose else []), "worker"]
    try:
        return serve_each(settings, command=words)
    except NoDevices as error:
        raise UsageError(f"--each-gpu: {error}") from error


def _begin_traces(settings: Settings, part: str) -> None:
    from core import traces

    try:
        traces.begin(settings.traces, part)
    except traces.TracesError as error:
        raise UsageError(f"DIPTYCH_TRACES: {error}") from error


def _check_extra() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{', '.join(missing)}: not installed; {pip_install('serve')} brings all that serving needs")


def _check_redis(settings: Settings) -> None:
    """Reject a URL that can never work."""
    from core.jobs.connection import RedisClient

    if not settings.redis_url:
        raise UsageError(f"DIPTYCH_REDIS_URL: must be given, {_SUCH_AS}; `diptych serve` alone brings its own Redis")
    try:
        RedisClient(settings.redis_url).close()
    except ValueError as error:
        raise UsageError(f"DIPTYCH_REDIS_URL: is not a Redis URL, {_SUCH_AS}") from error


def _wait_for_redis(settings: Settings) -> None:
    """Return when Redis answers; print once why it does not."""
    from core.jobs.connection import RedisClient, StoreError

    pause_s, error_text = _FIRST_PAUSE_S, ""
    with RedisClient(settings.redis_url) as client:
        while True:
            try:
                client.ping()
                return
            except StoreError as error:
                if str(error) != error_text:
                    error_text = str(error)
                    reason = printable_message(error_text)
                    print(f"diptych: DIPTYCH_REDIS_URL: {reason}; trying until it does", file=sys.stderr, flush=True)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

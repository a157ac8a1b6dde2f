"""Asks for a little of everything once all has ended, and reads what each process holds then.

All but one of these calls stay within their tenant's limits, so they must be answered; one exceeds a quota of files.
"""

from __future__ import annotations

import base64
import io
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import psutil
from PIL import Image

from tests.faults.histories.gallery import Gallery
from tests.faults.histories.line import Book, Line, shown
from tests.faults.histories.record import OK, REFUSED, UNKNOWN, Call, Level
from tests.faults.histories.returns import DESCRIPTORS, RATE_CODES, RSS_MIB
from tests.faults.histories.world import QUOTAS, World

_WITHIN = ("anna", "bert")  # tenants whose rates return within seconds
_ROUNDS = 3  # of warm-up
_SMALL = 2048  # bytes
_SIDE = 256  # pixels
_NUMBERS = itertools.count()


def quiet(world: World, line: Line, gallery: Gallery, until: float) -> None:
    """Ask for a picture, a text, an edit of a large picture, and room for files, while nothing else is asked.

    Every job has ended afterwards.
    """
    for tenant in _WITHIN:
        name = f"quiet-{tenant}-{next(_NUMBERS)}-{line.random.randrange(10**9)}"
        fields, wants = gallery.order(line.random, name, line=True)
        body = {"type": "image", **fields}
        made = _asked(world, line, line.submit, tenant, name, body, wants)
        if made.outcome == OK:
            ended(world, line, tenant, name, until)
        elif made.code in RATE_CODES:
            continue  # the others would wait as long
        _asked(world, line, line.text, tenant, name)
        if not world.real:
            edit = _asked(world, line, line.submit, tenant, f"{name}-edit", _large_edit(line.random), ())
            if edit.outcome == OK:
                ended(world, line, tenant, edit.about, until)
        listed = _asked(world, line, line.files, tenant, limit=10_000)
        size = QUOTAS[tenant] - listed.size if tenant in QUOTAS else _SMALL
        if listed.outcome != OK or size <= 0:
            continue
        uploads = [_asked(world, line, line.upload, tenant, line.random.randbytes(size))]
        if tenant in QUOTAS:
            _asked(world, line, line.files, tenant, limit=10_000)
            uploads.append(_asked(world, line, line.upload, tenant, b"\n"))  # beyond the quota
        for upload in uploads:
            if upload.outcome == OK:
                _asked(world, line, line.forget, tenant, upload.ids[0])


def _large_edit(random_: random.Random) -> dict[str, Any]:
    """An edit whose body is read and checked in the tenant's turn, since it is large."""
    stream = io.BytesIO()
    Image.frombytes("RGB", (_SIDE, _SIDE), random_.randbytes(3 * _SIDE**2)).save(stream, "PNG")
    inline = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
    return {"type": "edit", "prompt": "quiet", "steps": 2, "size": "32x32", "images": [{"image_url": inline}]}


def _asked(world: World, line: Line, ask: Callable[..., Call], *given: Any, **named: Any) -> Call:
    """The call that was answered, which is recorded. One that exceeds a rate is repeated until windows have passed."""
    until = time.monotonic() + world.patience_s
    while True:
        call = ask(*given, **named, quiet=True, keep=False)
        waits = call.outcome == UNKNOWN or (call.outcome == REFUSED and call.code in RATE_CODES)
        if not waits or time.monotonic() > until:
            return line.book.write(call)
        world.tend()
        time.sleep(0.2)


def ended(world: World, line: Line, tenant: str, id: str, until: float) -> Call:
    """Look at a job until it has ended; the last look is recorded as what it is in the end."""
    while True:
        call, _ = line.call("finally", tenant, "GET", f"/v1/jobs/{id}", shown, keep=False, about=id)
        done = call.outcome == REFUSED or (call.outcome == OK and call.seen[0].final)
        if done or time.monotonic() > until:
            return line.book.write(call)
        world.tend()
        time.sleep(0.1)


def patiently(ask: Callable[[], Call], world: World, until: float) -> Call:
    """Ask until there is an answer, of whatever kind."""
    while (call := ask()).outcome == UNKNOWN and time.monotonic() < until:
        world.tend()
        time.sleep(0.2)
    return call


def warm_up(world: World, gallery: Gallery) -> None:
    """Have every process do what it will do, and remember what it holds then."""
    line = Line(Book(), world.urls(), world.tokens, random.Random(0))
    try:
        for _ in range(_ROUNDS):
            quiet(world, line, gallery, time.monotonic() + 60)
    finally:
        line.close()
    for part in world.parts:
        kind, process = part.name.partition("-")[0], psutil.Process(part.pid)
        descriptors, rss_mib = world.warm.get(kind, (0, 0.0))
        held = process.num_fds(), process.memory_info().rss / 2**20
        world.warm[kind] = max(descriptors, held[0]), max(rss_mib, held[1])


def levels(world: World) -> list[Level]:
    """What each process holds; one that holds too much has some time to return it."""
    until = time.monotonic() + world.patience_s
    found = []
    for part in world.parts:
        descriptors, rss_mib = world.warm[part.name.partition("-")[0]]
        while True:
            world.tend()
            process = psutil.Process(part.pid)
            level = Level(part.name, process.num_fds(), process.memory_info().rss / 2**20, descriptors, rss_mib)
            high = level.descriptors > descriptors + DESCRIPTORS or level.rss_mib > rss_mib + RSS_MIB
            if not high or time.monotonic() > until:
                break
            time.sleep(0.2)
        found.append(level)
    return found

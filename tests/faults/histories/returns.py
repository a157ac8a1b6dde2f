"""Defines the rules on what must come back: room in queues, rates and quotas, memory and file descriptors."""

from __future__ import annotations

from collections.abc import Iterator

from tests.faults.histories.index import SUBMIT, Index, job_of
from tests.faults.histories.record import OK, REFUSED, UNKNOWN, Call

# What a process may hold more than after warm-up: connections that stay open, and what an allocator keeps.
DESCRIPTORS, RSS_MIB = 64, 96.0
RATE_CODES = {"rate_limit_exceeded": "requests", "quota_exceeded": "pictures"}  # code of a refusal → what is limited
_VALID = ("submit", "text", "upload", "batch", "files", "list")
_SHARE, _QUOTA = "queue_share_full", "files_quota_exceeded"


def refusals_are_due(index: Index) -> Iterator[str]:
    """A refusal for a share or a rate comes only while that much may wait, or may have been asked for.

    What clients ask for is valid, so it is never refused as invalid.
    """
    jumps = sum(abs(fault.size) for fault in index.history.faults if fault.kind == "clock_redis")
    for call in index.calls:
        if call.status == 400 and call.op in _VALID and not _never_fits(index, call):
            yield f"{call.op} {call.about}: {call.tenant}'s valid request was refused as {call.code}"
        if call.outcome != REFUSED or call.status != 429:
            continue
        if call.code == _SHARE and (most := _most_waiting(index, call)) < index.history.limits.share:
            yield f"{call.op} {call.about}: {call.tenant}'s share was full, though at most {most} of its jobs waited"
        what = RATE_CODES.get(call.code, "")
        limit = getattr(index.history.limits, what, {}).get(call.tenant) if what else None
        if limit is not None:
            count, seconds = limit
            since = call.begin - 2 * seconds - jumps  # a sliding window weighs the one before it
            if since >= 0 and (most := _most_charged(index, call, what, since)) + call.cost <= count:
                yield f"{call.op} {call.about}: {call.tenant} had asked for at most {most} {what} of {count}"


def _never_fits(index: Index, refusal: Call) -> bool:
    """Whether a request was refused for costing more than the tenant's whole limit."""
    what = RATE_CODES.get(refusal.code, "")
    limit = getattr(index.history.limits, what, {}).get(refusal.tenant) if what else None
    return limit is not None and refusal.cost > limit[0]


def _most_waiting(index: Index, refusal: Call) -> int:
    """How many of this tenant's jobs may have waited at most: whatever is not known to have ended."""
    text = refusal.op == "text"
    most = 0
    ended = {call.about for call in index.calls if call.op == "batch_end" and call.end < refusal.begin}
    for call in index.calls:
        if call.tenant != refusal.tenant or call.begin > refusal.end or call is refusal or call.outcome == REFUSED:
            continue
        if call.op == "text" and text:
            most += call.outcome != OK or call.end > refusal.begin
        elif call.op == SUBMIT and not text:
            most += call.outcome != OK or not _over(index, call, refusal.begin)
        elif call.op == "batch" and not text:
            most += 0 if set(call.ids) & ended else len(call.wants) or 1
    return most


def _over(index: Index, submit: Call, at: float) -> bool:
    """Whether the job that this call made is known to have ended, or to be erased, before `at`."""
    job = job_of(submit, submit.seen[0])
    if any(seen.final and call.end < at for call, seen in index.seen[job]):
        return True
    erases = index.erases[submit.tenant, job[0]]
    return any(erase.outcome == OK and submit.end < erase.begin and erase.end < at for erase in erases)


def _most_charged(index: Index, refusal: Call, what: str, since: float) -> int:
    """What may have been charged since then, beside this call: every call counts, whatever its answer.

    A call without an answer may take effect at any later time.
    """
    others = (
        call for call in index.calls
        if call is not refusal and call.tenant == refusal.tenant and call.begin < refusal.end
        and (call.end > since or call.outcome == UNKNOWN)
    )  # fmt: skip
    return sum(max(call.cost, len(call.wants)) if what == "pictures" else 1 for call in others)


def quiet_calls_are_answered(index: Index) -> Iterator[str]:
    """Once all has ended nothing is refused for want of room, except files beyond the tenant's quota."""
    held: dict[str, int] = {}
    for call in index.calls:
        if not call.quiet:
            continue
        if call.op == "files" and call.outcome == OK:
            held[call.tenant] = call.size
        quota = index.history.limits.files.get(call.tenant)
        over = call.op == "upload" and quota is not None and held.get(call.tenant, 0) + call.size > quota
        if over and call.outcome == OK:
            yield f"upload: {call.tenant} holds {held[call.tenant]} bytes, and {call.size} beyond the quota were taken"
        elif not over and call.outcome != OK:
            size = f" of {call.size} bytes" if call.size else ""
            yield f"{call.op}{size}: {call.tenant} was answered {call.status} {call.code}, though all had ended"
        elif over and call.code != _QUOTA:
            yield f"{call.op}: {call.tenant} was answered {call.status} {call.code} beyond the quota"


def resources_return(index: Index) -> Iterator[str]:
    """Once all has ended, no process holds much more memory or more files than after its warm-up."""
    for level in index.history.levels:
        if level.descriptors > level.warm_descriptors + DESCRIPTORS:
            yield f"{level.part} holds {level.descriptors} file descriptors, {level.warm_descriptors} after warm-up"
        if level.rss_mib > level.warm_rss_mib + RSS_MIB:
            yield f"{level.part} holds {level.rss_mib:.0f} MiB, {level.warm_rss_mib:.0f} after warm-up"

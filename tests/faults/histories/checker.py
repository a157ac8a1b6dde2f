"""Checks a history against the API's guarantees: a pure function from a history to its violations.

Each rule is one function; it reports nothing if a call's outcome is unknown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from tests.faults.histories.index import CANCEL, ERASE, SUBMIT, Index, Job, job_of
from tests.faults.histories.record import FINAL, OK, REFUSED, UNKNOWN, Call, History, Seen, Stored, Told
from tests.faults.histories.returns import quiet_calls_are_answered, refusals_are_due, resources_return
from tests.faults.histories.strangers import EARLY

# Ends that only some faults may bring: code → kinds of faults.
_EXPLAINED = {
    "artifact_error": ("storage", "disk", "no_memory"),
    "out_of_memory": ("no_memory",),
    "engine_error": ("no_memory",),
    "crashed": (
        "kill_worker", "pause_", "redis", "cut", "hang", "slow", "clock", "disown", "other",
        "storage", "disk", "no_memory",
    ),
}  # fmt: skip
TAKEN = "id_taken"  # the code of a refusal of an id that is not free
_FEW = frozenset({502, 504})  # what no part of the service answers with


@dataclass(frozen=True)
class Problem:
    """A rule that was broken, and by what."""

    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


def check(history: History) -> list[Problem]:
    """Everything that is wrong with it, rule by rule."""
    index = Index(history)
    return [Problem(rule.__name__.removesuffix("_"), text) for rule in RULES for text in rule(index)]


def accepted_means_ends(index: Index) -> Iterator[str]:
    """An accepted job that was not erased exists at the end, and has ended."""
    for job, call in index.accepted.items():
        if index.erased(call, job):
            continue
        last = index.finally_.get((call.tenant, job[0]))
        if last is None or last.outcome == UNKNOWN:
            yield f"{job[0]} was accepted and could not be looked at in the end"
        elif last.outcome == REFUSED:
            yield f"{job[0]} was accepted and is lost ({last.status} {last.code})"
        elif last.seen[0].created != job[1]:
            yield f"{job[0]} was accepted, and is another job in the end"
        elif not last.seen[0].final:
            yield f"{job[0]} never ended: it is {last.seen[0].status}"


def ends_stay(index: Index) -> Iterator[str]:
    """A job's final state never changes, and attempts only increase, for every reader."""
    for job, found in index.seen.items():
        ended: tuple[Call, Seen] | None = None
        most = 0
        # What was answered before another call began came before it.
        for call, seen in sorted(found, key=lambda one: one[0].begin):
            if ended is not None and ended[0].end < call.begin and seen.status != ended[1].status:
                yield f"{job[0]} was {ended[1].status}, and then {seen.status}"
            if seen.final and (ended is None or call.end < ended[0].end):
                ended = call, seen
        attempts = sorted((call.end, call.begin, seen.attempt) for call, seen in found)
        for k, (end, _, attempt) in enumerate(attempts):
            most = max(most, attempt)
            if any(begin > end and later < most for _, begin, later in attempts[k + 1 :]):
                yield f"{job[0]}: attempts were counted back from {most}"
                break
        ends = {seen.status for _, seen in found if seen.final}
        if len(ends) > 1:
            yield f"{job[0]} ended as {' and as '.join(sorted(ends))}"


def events_in_order(index: Index) -> Iterator[str]:
    """One terminal event, the last; ids and attempts increase; progress is the running attempt's and increases."""
    for call in index.calls:
        for text in disorder(call.told, whole=call.whole):
            yield f"{call.about}: {text}"


def disorder(told: tuple[Told, ...], *, whole: bool) -> Iterator[str]:
    """What is wrong with the order of one job's events."""
    positions = [tuple(map(int, re.findall(r"\d+", one.id))) for one in told if one.id]
    if any(b <= a for a, b in pairwise(positions)):
        yield "events came twice or out of order"
    ends = [k for k, one in enumerate(told) if one.type in FINAL]
    if len(ends) > 1:
        yield f"it ended more than once: {[told[k].type for k in ends]}"
    if ends and ends[0] != len(told) - 1:
        yield f"after its end something was told: {told[ends[0] + 1].type}"
    for one in told:
        if one.job is not None and one.job.status != one.type:
            yield f"the event {one.type} shows a job that is {one.job.status}"
    attempts = [one.value for one in told if one.type == "running"]
    if any(b <= a for a, b in pairwise(attempts)):
        yield f"attempts are not counted up: {attempts}"
    if whole and told and told[0].type != "queued" and told[0].id:
        yield f"its events begin with {told[0].type}"
    running, steps = not whole, 0
    for one in told:
        if one.type == "progress":
            if not running or one.value < steps:
                yield "progress was told by an attempt that does not run"
                return
            steps = one.value
        else:
            running, steps = one.type == "running" or (not whole and one is told[0]), 0


def events_are_of_their_job(index: Index) -> Iterator[str]:
    """A follower receives events of that job, and not of an earlier one with the same id."""
    for call in index.calls:
        if call.op != "events" or not call.created:
            continue
        made = index.accepted.get((call.about, call.created, call.tenant))
        since = 0.0 if made is None else made.begin
        if any(e.end >= since and e.begin <= call.end for e in index.erases[call.tenant, call.about]):
            continue  # it may have become another meanwhile
        for one in call.told:
            if one.job is not None and one.job.created != call.created:
                yield f"{call.about}: events of another job were told to who followed the one of {call.created}"


def bytes_of_their_request(index: Index) -> Iterator[str]:
    """A picture, a file's content and a text are those of the request that they are shown for."""
    for call in index.calls:
        if call.outcome != OK or call.op not in ("picture", "link", "content", "text"):
            continue
        if call.wants and not set(call.got) <= set(call.wants):
            yield f"{call.op} of {call.about or call.key} ({call.tenant or 'no key'}): other bytes than were asked for"
        elif call.op == "picture" and not call.wants:
            may = _could_be(index, call)
            if not set(call.got) <= may:
                yield f"picture of {call.about}: bytes that {call.tenant} never asked for under this id"


def _could_be(index: Index, call: Call) -> set[str]:
    """Digests of what this tenant may find under this id: of what they asked for there, and had not erased before.

    What got no answer may take effect at any later time, after an erasure too.
    """
    found: set[str] = set()
    for made in index.submits:
        if (made.tenant, made.about) == (call.tenant, call.about) and made.begin < call.end:
            gone = [
                e
                for e in index.erases[call.tenant, call.about]
                if e.outcome == OK and e.begin > made.end < call.begin > e.end
            ]
            if made.outcome == UNKNOWN or (made.outcome == OK and not gone):
                found |= set(made.wants)
    return found


def pictures_are_there(index: Index) -> Iterator[str]:
    """What a job that succeeded made can be fetched in the end."""
    for call in index.calls:
        if call.op == "picture" and call.whole and call.outcome == REFUSED:
            yield f"{call.about} succeeded, and its picture is answered {call.status} {call.code}"


def own_things_only(index: Index) -> Iterator[str]:
    """No tenant is shown, or may touch, another's job, file or batch; nor do ids that others chose stand in its way."""
    owners: dict[tuple[str, float], set[str]] = defaultdict(set)
    for id, created, tenant in index.accepted:
        owners[id, created].add(tenant)
    for (id, created, tenant), shown in index.seen.items():
        if tenant and (holders := owners[id, created]) and tenant not in holders:
            for call, _ in shown:
                yield f"{call.op}: {tenant} was shown {id}, which is {' and '.join(sorted(holders))}'s"
    for call in index.submits:
        if call.code == TAKEN:
            yield f"{call.op}: {call.about} of {call.tenant} was taken"
    things = {id: c.tenant for c in index.calls if c.op in ("upload", "batch") and c.outcome == OK for id in c.ids}
    for call in index.calls:
        if call.outcome == OK and call.tenant and call.op in ("files", "content", "forget", "batches", "batch_look"):
            for id in (*call.ids, *([call.about] if call.about else [])):
                if things.get(id, call.tenant) != call.tenant:
                    yield f"{call.op}: {call.tenant} was shown {id}, which is {things[id]}'s"


def strangers_get_nothing(index: Index) -> Iterator[str]:
    """A thing that is another's is answered as one that does not exist; without a key, every thing as needing one. A
    batch may name it in its lines, and nothing comes of these.
    """
    drawn = {call.about for call in index.calls if call.op == "batch_end" and call.got}
    for call in index.calls:
        if not call.owner or call.owner == call.tenant:
            continue
        early = 400 if call.op in EARLY else 0
        who, whose = call.tenant or "nobody", f"{call.about}, which is {call.owner}'s"
        if call.op == "batch":
            if not drawn.isdisjoint(call.ids):
                yield f"{call.op} line: {who} was let at {whose}"
            continue
        if call.outcome == OK:
            yield f"{call.op}: {who} was let at {whose}"
        elif call.outcome == REFUSED and call.status not in (404 if call.tenant else 401, 429, early):
            yield f"{call.op}: {who} was answered {call.status} {call.code} for {whose}, and so learns of it"


def once_for_each_key(index: Index) -> Iterator[str]:
    """An Idempotency-Key that is repeated makes one job."""
    made: dict[tuple[str, str], Job] = {}
    for call in index.submits:
        if call.key and call.outcome == OK:
            job = job_of(call, call.seen[0])
            first = made.setdefault((call.tenant, call.key), job)
            if first != job and not index.erases.get((call.tenant, first[0])):
                yield f"{call.key} of {call.tenant} made {first[0]} and {job[0]}"


def ends_are_explained(index: Index) -> Iterator[str]:
    """A job is cancelled only on request, and fails only because of an injected fault."""
    kinds = [fault.kind for fault in index.history.faults]
    asked = {(c.about, c.tenant) for c in index.calls if c.op in (CANCEL, ERASE) and c.outcome != REFUSED}
    losses = {
        (call.about, call.tenant): sum(one.type == "queued" for one in call.told[1:])
        for call in index.calls
        if call.op in ("events", "stream") and call.whole
    }
    for job in index.accepted:
        named = job[0], job[2]
        for seen in {seen for _, seen in index.seen[job] if seen.final}:
            if seen.status == "cancelled" and named not in asked:
                yield f"{job[0]} was cancelled, and nobody asked for it"
            if seen.status == "expired":
                yield f"{job[0]} expired, and had no deadline"
            if seen.status == "failed":
                may = _EXPLAINED.get(seen.error, ())
                if not any(kind.startswith(may) for kind in kinds if may):
                    yield f"{job[0]} failed with {seen.error or 'no code'}, and nothing was broken that explains it"
                needed = index.history.limits.max_attempts - 1
                if seen.error == "crashed" and losses.get(named, needed) < needed:
                    yield f"{job[0]} was given up after {losses[named] + 1} attempts"


def limits_hold(index: Index) -> Iterator[str]:
    """No tenant had more taken than their rate allows, and no queue held more than it may."""
    limits = index.history.limits
    jumped = sum(fault.kind == "clock_redis" for fault in index.history.faults)
    for name, rates in (("requests", limits.requests), ("pictures", limits.pictures)):
        for tenant, (count, seconds) in rates.items():
            taken = [
                (call.begin, call.cost if name == "pictures" else 1) for call in index.calls
                if call.tenant == tenant and call.outcome == OK and call.op in _COUNTED[name]
            ]  # fmt: skip
            if (most := max((cost for _, cost in taken), default=0)) > count:
                yield f"{tenant} had {most} {name} taken at once, where {count} are allowed in {seconds:g} s"
            # What slides over two windows lets at most two of them meet; each jump of the clock may begin new ones.
            for k, (at, _) in enumerate(taken):
                within = sum(cost for other, cost in taken[k:] if other < at + seconds)
                if within > 2 * count * (1 + 2 * jumped):
                    yield f"{tenant} had {within} {name} taken in {seconds:g} s, where {count} are allowed"
                    break
    if jumped:
        return
    changes = sorted(
        change for call in index.calls if call.op == "stream" and call.whole for change in _waiting(call.told)
    )
    waiting = 0
    for at, change in changes:
        waiting += change
        if waiting > limits.max_queued + _RETURNED:
            yield f"at {at} {waiting} jobs waited in a queue of {limits.max_queued}"
            break


_COUNTED = {"requests": (SUBMIT, ERASE, "upload", "batch"), "pictures": (SUBMIT, "batch")}
_RETURNED = 16  # what came back from workers is taken however full the queue is


def _waiting(told: tuple[Told, ...]) -> Iterator[tuple[tuple[int, ...], int]]:
    waits = False
    for one in told:
        if (one.type == "queued") != waits and one.id:
            waits = not waits
            yield tuple(map(int, re.findall(r"\d+", one.id))), 1 if waits else -1


def answers_are_documented(index: Index) -> Iterator[str]:
    """No part of the service fails at a call in a way that it does not name."""
    for call in index.calls:
        if call.status in _FEW or (call.status >= 500 and call.status != 503 and call.code not in _NAMED):
            yield f"{call.op} {call.about}: answered {call.status} {call.code}"
        if call.status < 0:
            yield f"{call.op} {call.about}: no answer within {call.end - call.begin:.0f} s"


_NAMED = frozenset({"artifact_error", "crashed"})


def batches_are_whole(index: Index) -> Iterator[str]:
    """A batch ends, and reports each of its lines once, with that line's bytes."""
    asked = {id: call for call in index.calls if call.op == "batch" and call.outcome == OK for id in call.ids}
    told = {call.about: call for call in index.calls if call.op == "batch_end"}
    broken = any(fault.kind.startswith(("storage", "disk")) for fault in index.history.faults)
    for id, call in asked.items():
        end = told.get(id)
        if end is None or end.outcome != OK:
            yield f"{id} was accepted and could not be looked at in the end"
        elif end.code not in ("completed", "cancelled", "failed", "expired"):
            yield f"{id} never ended: it is {end.code}"
        elif end.code == "completed" and sorted(end.got) != sorted(call.wants) and not broken:
            yield f"{id} does not tell of each of its lines once, as it was asked for"
        elif end.code == "completed" and set(end.got) - set(call.wants):
            yield f"{id} tells of what no line of it asked for"


def nothing_is_left(index: Index) -> Iterator[str]:
    """When all has ended, nothing is counted as waiting or running."""
    yield from index.history.left


def tenants_are_counted(index: Index) -> Iterator[str]:
    """While jobs wait and run, their tenants' counters know them, and no attempt that is over changes one."""
    yield from index.history.miscounted


def little_is_stored(index: Index) -> Iterator[str]:
    """What a tenant leaves in Redis is small in each record, however large a request or an answer was, and counted."""
    # A result that cannot be stored elsewhere stays in its record.
    broken = any(fault.kind.startswith(("storage", "disk", "no_memory", "other")) for fault in index.history.faults)
    for tenant, stored in index.history.stored.items():
        before = index.history.stored_before.get(tenant, Stored(0, 0))  # an earlier history may have been broken so
        if stored.largest_bytes > max(RECORD_BYTES, before.largest_bytes) and not broken:
            yield f"{tenant} has left a record of {stored.largest_bytes} bytes"
        if stored.uncounted_bytes > before.uncounted_bytes and not broken:
            yield f"{tenant} has left {stored.uncounted_bytes} bytes in large records that are not counted"


RECORD_BYTES = 98_304  # of a record's values at most


RULES: tuple[Callable[[Index], Iterator[str]], ...] = (
    accepted_means_ends, ends_stay, events_in_order, events_are_of_their_job, bytes_of_their_request,
    pictures_are_there, own_things_only, strangers_get_nothing, once_for_each_key, ends_are_explained, limits_hold,
    refusals_are_due, quiet_calls_are_answered, resources_return, answers_are_documented, batches_are_whole,
    nothing_is_left, tenants_are_counted, little_is_stored,
)  # fmt: skip

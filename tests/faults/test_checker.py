"""Tests that the checker accepts valid histories, in any order of calls, and names the violated rule otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.faults.histories.checker import RECORD_BYTES, RULES, check
from tests.faults.histories.record import OK, REFUSED, UNKNOWN, Call, Fault, History, Level, Limits, Seen, Stored, Told
from tests.faults.histories.returns import DESCRIPTORS, RSS_MIB

ENDS = ("succeeded", "cancelled")


def seen(id: str, status: str, attempt: int = 1, created: float = 1.0, error: str = "") -> Seen:
    return Seen(id, created, status, attempt, error)


def call(op: str, at: float, about: str, *shown: Seen, tenant: str = "anna", **more: object) -> Call:
    return Call(op, tenant, at, at + 0.5, OK, 200, about=about, seen=shown, **more)  # type: ignore[arg-type]


def stream(id: str, end: str, attempts: int = 1, created: float = 1.0) -> tuple[Told, ...]:
    told: list[Told] = []
    for attempt in range(1, attempts + 1):
        told += [Told("", "queued"), Told("", "running", attempt), Told("", "progress", 1), Told("", "progress", 2)]
    told.append(Told("", end, 0, Seen(id, created, end, attempts)))
    return tuple(replace(one, id=f"{1000 + k}-0") for k, one in enumerate(told))


@st.composite
def lives(draw: st.DrawFn) -> list[Call]:
    """What a client sees of one job that goes as it should; calls may overlap, fail, and come late."""
    id, attempts, end = f"job-{draw(st.integers(0, 10**6))}", draw(st.integers(1, 4)), draw(st.sampled_from(ENDS))
    at = draw(st.floats(0, 5))
    calls = [call("submit", at, id, seen(id, "queued", 0), wants=("mine",))]
    if end == "cancelled":
        calls.append(call("cancel", at + 10, id, seen(id, "cancelled", attempts)))
    for attempt in range(1, attempts + 1):
        if draw(st.booleans()):
            calls.append(call("look", at + attempt, id, seen(id, "running", attempt)))
    calls.append(call("finally", 50, id, seen(id, end, attempts)))
    calls.append(call("events", 60, id, told=stream(id, end, attempts), whole=True, created=1.0))
    if draw(st.booleans()):
        calls.append(replace(calls[-1], begin=at + 2, told=calls[-1].told[: draw(st.integers(0, 3))], whole=False))
    if end == "succeeded":
        calls.append(call("picture", 61, id, wants=("mine",), got=("mine",), whole=True))
    if draw(st.booleans()):
        calls.append(replace(calls[0], op="look", begin=at + 0.1, outcome=UNKNOWN, seen=(), wants=()))
    return calls


@st.composite
def histories(draw: st.DrawFn) -> History:
    found = {calls[0].about: calls for calls in draw(st.lists(lives(), min_size=1, max_size=5))}
    calls = [one for some in found.values() for one in some]
    return History(1, [Fault(1, "kill_worker")], draw(st.permutations(calls)), Limits(max_attempts=8))


@given(histories())
def test_what_goes_well_is_accepted(history: History) -> None:
    assert check(history) == []


def broken(rule: str, history: History) -> None:
    found = check(history)
    assert rule in {problem.rule for problem in found}, found


@given(histories(), st.data())
def test_what_is_lost_is_found(history: History, data: st.DataObject) -> None:
    lost = data.draw(st.sampled_from([one for one in history.calls if one.op == "finally"]))
    others = [one for one in history.calls if one is not lost]
    gone = replace(lost, outcome=REFUSED, status=404, seen=())
    broken("accepted_means_ends", replace(history, calls=[*others, gone]))
    broken("accepted_means_ends", replace(history, calls=others))
    waits = replace(lost, seen=(replace(lost.seen[0], status="queued"),))
    broken("accepted_means_ends", replace(history, calls=[*others, waits]))
    another = replace(lost, seen=(replace(lost.seen[0], created=2.0),))
    broken("accepted_means_ends", replace(history, calls=[*others, another]))


@given(histories(), st.data())
def test_an_end_that_changes_is_found(history: History, data: st.DataObject) -> None:
    last = data.draw(st.sampled_from([one for one in history.calls if one.op == "finally"]))
    for status in {"succeeded", "cancelled", "running"} - {last.seen[0].status}:
        later = replace(last, op="look", begin=90, end=91, seen=(replace(last.seen[0], status=status),))
        broken("ends_stay", replace(history, calls=[*history.calls, later]))
    fewer = replace(last, op="look", begin=90, end=91, seen=(replace(last.seen[0], attempt=0),))
    broken("ends_stay", replace(history, calls=[*history.calls, fewer]))


def _streams(told: tuple[Told, ...]) -> dict[str, tuple[Told, ...]]:
    """What an order of events may be wrong in."""
    end = told[-1]
    return {
        "twice": (*told, replace(end, id="9999-0")),
        "after": (*told, Told("9999-0", "progress", 3)),
        "back": (*told[:3], replace(told[3], value=0), *told[4:]),
        "stale": (told[0], replace(told[2], id="1000-1"), *told[1:]),
        "order": (told[1], told[0], *told[2:]),
        "attempt": (*told[:-1], Told("1900-0", "queued"), Told("1901-0", "running", 1), replace(end, id="1902-0")),
        "other": (*told[:-1], replace(end, job=replace(end.job, status="queued"))) if end.job else told,
    }


@given(histories(), st.data())
def test_events_out_of_order_are_found(history: History, data: st.DataObject) -> None:
    events = data.draw(st.sampled_from([one for one in history.calls if one.op == "events" and one.whole]))
    for told in _streams(events.told).values():
        wrong = [replace(one, told=told) if one is events else one for one in history.calls]
        broken("events_in_order", replace(history, calls=wrong))


_NONE = Limits()


def job(*more: Call, faults: tuple[str, ...] = (), limits: Limits = _NONE, **named: object) -> History:
    """One job that goes well, and some more calls."""
    calls = [
        call("submit", 0, "a", seen("a", "queued", 0), wants=("mine",)),
        call("finally", 50, "a", seen("a", "succeeded")),
        *more,
    ]
    return History(1, [Fault(1, kind) for kind in faults], calls, limits, **named)  # type: ignore[arg-type]


def ended(id: str, status: str, *more: Call, error: str = "") -> list[Call]:
    """A job that was accepted, and how it ended."""
    return [call("submit", 2, id, seen(id, "queued", 0)), call("finally", 50, id, seen(id, status, error=error)), *more]


def again() -> list[Call]:
    """The id `a` was used for another job, which succeeded."""
    return [call("picture", 70, "a", got=("second",)), call("finally", 80, "a", seen("a", "succeeded", created=2.0))]


def waited(k: int) -> tuple[Told, ...]:
    return Told(f"1-{k}", "queued"), Told(f"2-{k}", "running", 1)


SHARED, RATED = Limits(share=2), Limits(requests={"anna": (5, 2.0)}, pictures={"anna": (5, 2.0)})
FILES = Limits(files={"anna": 10})
SHARE, RATE, QUOTA = "queue_share_full", "rate_limit_exceeded", "files_quota_exceeded"
BATCH = call("batch", 2, "", ids=("batch_1",), wants=("0 x", "1 y"))


def refused(op: str, at: float, about: str, status: int, code: str = "", **more: object) -> Call:
    return replace(call(op, at, about, **more), outcome=REFUSED, status=status, code=code)  # type: ignore[arg-type]


def unknown(op: str, at: float, about: str, status: int = 503, **more: object) -> Call:
    return replace(call(op, at, about), outcome=UNKNOWN, status=status, **more)  # type: ignore[arg-type]


def waiting(op: str, count: int) -> list[Call]:
    """Calls that may have made a job each, of which nobody knows the end."""
    return [unknown(op, k + 1, f"w{k}") for k in range(count)]


def full(at: float, code: str, op: str = "submit", status: int = 429, **more: object) -> Call:
    """A refusal for want of room."""
    return refused(op, at, "b", status, code, **more)


def asked(count: int, at: float) -> list[Call]:
    """Calls that end at about that time and count against a rate."""
    return [replace(call("list", at, ""), end=at + 0.4) for _ in range(count)]


def filled(size: int, then: Call) -> list[Call]:
    """So many bytes of files that are listed, and a quiet call after that."""
    return [call("files", 55, "", quiet=True, size=size), then]


WRONG: dict[str, list[History]] = {
    "events_are_of_their_job": [
        job(call("events", 60, "a", told=stream("a", "succeeded", created=2.0), whole=True, created=1.0)),
    ],
    "bytes_of_their_request": [
        job(call("picture", 60, "a", wants=("mine",), got=("another's",))),
        job(call("picture", 60, "a", got=("another's",))),
        job(call("picture", 60, "a", got=("mine",), tenant="bert")),
        job(call("link", 60, "a", wants=("mine",), got=("another's",), tenant="")),
        job(call("text", 60, "", wants=("mine",), got=("another's",))),
        job(call("content", 60, "file-1", wants=("mine",), got=("another's",))),
        job(call("erase", 60, "a"), call("picture", 70, "a", got=("mine",))),
    ],
    "pictures_are_there": [job(refused("picture", 60, "a", 404, whole=True))],
    "own_things_only": [
        job(call("list", 60, "", seen("a", "succeeded"), tenant="bert")),
        job(call("probe", 60, "a", seen("a", "succeeded"), tenant="bert")),
        job(call("upload", 1, "", ids=("file-1",)), call("files", 60, "", ids=("file-1",), tenant="bert")),
        job(call("upload", 1, "", ids=("file-1",)), call("content", 60, "file-1", tenant="bert")),
        job(refused("submit", 60, "a", 409, "id_taken", tenant="bert")),
    ],
    "once_for_each_key": [
        job(
            *(call("submit", k, id, seen(id, "queued", 0), key="same") for k, id in enumerate("bc")),
            *(call("finally", 50, id, seen(id, "succeeded")) for id in "bc"),
        ),
    ],
    "ends_are_explained": [
        job(*ended("b", "cancelled")),
        job(*ended("b", "cancelled"), call("cancel", 40, "b", seen("b", "cancelled", created=2.0), tenant="bert")),
        job(*ended("b", "expired")),
        job(*ended("b", "failed", error="engine_error"), faults=("kill_worker", "disk_full")),
        job(*ended("b", "failed", error="artifact_error"), faults=("kill_worker",)),
        job(*ended("b", "failed", call("events", 60, "b", told=stream("b", "failed", 2), whole=True), error="crashed"),
            faults=("kill_worker",)),
    ],
    "limits_hold": [
        *(job(*(one for k in range(9) for one in ended(f"b{k}", "succeeded")),
              limits=Limits(**{name: {"anna": (4, 60.0)}}))  # type: ignore[arg-type]
          for name in ("requests", "pictures")),
        job(*(call("stream", 60, f"b{k}", told=waited(k), whole=True) for k in range(30)), limits=Limits(max_queued=4)),
    ],
    "answers_are_documented": [
        job(unknown("look", 60, "a", status, code=code)) for status, code in ((500, ""), (502, "x"), (-1, ""))
    ],
    "batches_are_whole": [
        job(BATCH),
        job(BATCH, call("batch_end", 60, "batch_1", code="in_progress")),
        *(job(BATCH, call("batch_end", 60, "batch_1", code="completed", got=got))
          for got in (("0 x",), ("0 x", "0 x", "1 y"), ("0 x", "1 another's"))),
    ],
    "strangers_get_nothing": [
        job(call("probe file content", 60, "file-1", owner="anna", tenant=tenant)) for tenant in ("bert", "")
    ] + [
        # That it exists is told by any other answer than that of a thing that does not.
        job(refused("probe job requeue", 60, "a", status, owner="anna", tenant=tenant))
        for tenant, status in (("bert", 400), ("bert", 403), ("bert", 409), ("bert", 401), ("", 404), ("", 403))
    ] + [
        job(call("batch", 2, "file-1", ids=("batch_1",), owner="bert", wants=("stolen x",)),
            call("batch_end", 60, "batch_1", code="completed", got=("stolen x",)))
    ],
    "refusals_are_due": [
        job(full(60, SHARE), limits=SHARED),
        job(*waiting("text", 1), full(60, SHARE), limits=SHARED),
        job(*waiting("submit", 5), full(60, SHARE, "text"), limits=SHARED),
        # All that waited have ended, or are erased.
        job(
            call("submit", 1, "b", seen("b", "queued", 0)), call("erase", 2, "b"), call("batch", 1, "", ids=("x",)),
            call("batch_end", 50, "x", code="completed"), full(60, SHARE), limits=Limits(share=1),
        ),
        job(full(60, RATE), limits=RATED),
        job(*asked(20, at=40), full(60, RATE, "erase"), limits=RATED),
        job(*asked(3, at=59), full(60, RATE), limits=RATED),
        job(*asked(1, at=59), full(60, "quota_exceeded"), limits=RATED),
        job(full(60, "invalid_value", status=400)),
    ],
    "quiet_calls_are_answered": [
        job(full(60, QUOTA, "upload", quiet=True, size=9)),
        job(full(60, SHARE, "text", quiet=True), limits=Limits(share=1)),
        job(full(60, "store_down", "text", 503, quiet=True)),
        job(*filled(6, full(60, QUOTA, "upload", quiet=True, size=4)), limits=FILES),
        job(*filled(6, call("upload", 60, "", quiet=True, size=5)), limits=FILES),
        job(*filled(6, full(60, "", "upload", 500, quiet=True, size=5)), limits=FILES),
    ],
    "resources_return": [
        job(levels=[Level("api-0", 20 + DESCRIPTORS + 1, 100, 20, 100)]),
        job(levels=[Level("worker-1", 20, 101 + RSS_MIB, 20, 100)]),
    ],
    "nothing_is_left": [job(left=["the image queue's counters are not zero"])],
}  # fmt: skip


@pytest.mark.parametrize("rule", WRONG)
def test_a_broken_rule_is_named(rule: str) -> None:
    for history in WRONG[rule]:
        broken(rule, history)


def test_every_rule_is_tried() -> None:
    apart = {"accepted_means_ends", "ends_stay", "events_in_order", "little_is_stored", "tenants_are_counted"}
    assert {rule.__name__ for rule in RULES} == set(WRONG) | apart


ALLOWED = [
    job(),
    job(call("erase", 40, "a"), refused("look", 45, "a", 404)),
    job(call("erase", 55, "a"), call("submit", 60, "a", seen("a", "queued", 0, created=2.0), wants=("second",)),
        *again()),
    job(unknown("erase", 40, "a"), call("picture", 70, "a", got=("mine",))),
    # What was submitted and got no answer takes effect after the erasure.
    job(unknown("submit", 3, "a", wants=("second",)), call("erase", 40, "a"), *again()),
    job(*ended("b", "failed", error="artifact_error"), faults=("disk_full",)),
    job(unknown("look", 60, "a")),
    # Two tenants chose one id, at once.
    job(*(replace(one, tenant="bert", got=one.got and ("theirs",), wants=one.wants and ("theirs",))
          for one in job(call("picture", 60, "a", wants=("mine",), got=("mine",), whole=True)).calls),
        call("picture", 60, "a", wants=("mine",), got=("mine",), whole=True)),
    job(refused("look", 60, "a", 404, tenant="bert")),
    *(job(refused("probe job look", 60, "a", status, owner="anna", tenant=tenant))
      for tenant, status in (("bert", 404), ("bert", 429), ("", 401))),
    job(unknown("probe job look", 60, "a", owner="anna", tenant="bert")),
    job(refused("probe picture control", 60, "file-1", 400, owner="anna", tenant="bert")),
    *(job(*waiting(op, 2), full(60, SHARE, op), limits=SHARED) for op in ("submit", "text")),
    # A job that nobody saw end may wait, and so may all lines of a batch.
    job(*ended("b", "succeeded"), full(40, SHARE), limits=SHARED),
    job(unknown("batch", 1, "", wants=("x", "y")), full(60, SHARE), limits=SHARED),
    job(*asked(5, at=58), full(60, RATE, "erase"), limits=RATED),
    # What was asked for before the history began is not known; after a jump of the clock, windows last longer.
    job(full(3, RATE), limits=RATED),
    replace(job(*asked(5, at=50), full(60, RATE), limits=RATED), faults=[Fault(1, "clock_redis", size=-6.0)]),
    job(*waiting("submit", 5), full(60, RATE), limits=RATED),
    job(*filled(6, full(60, QUOTA, "upload", quiet=True, size=5)), limits=FILES),
    job(*filled(6, call("upload", 60, "", quiet=True, size=4)), limits=FILES),
    job(levels=[Level("api-0", 20 + DESCRIPTORS, 100 + RSS_MIB, 20, 100)]),
]  # fmt: skip


@pytest.mark.parametrize("history", ALLOWED)
def test_what_is_allowed_is_accepted(history: History) -> None:
    assert check(history) == []


def test_what_a_tenant_leaves_and_is_counted_for() -> None:
    small, large = Stored(RECORD_BYTES, 0), Stored(RECORD_BYTES + 1, 0)
    assert check(History(1, stored={"anna": small})) == []
    broken("little_is_stored", History(1, stored={"anna": small, "bert": large}))
    broken("little_is_stored", History(1, stored={"anna": Stored(9_000, 1)}))
    assert check(History(1, [Fault(1, "storage_cut")], stored={"anna": large})) == [], "it could lie nowhere else"
    assert check(History(1, stored={"anna": large}, stored_before={"anna": large})) == [], "an earlier history's"
    broken("little_is_stored", History(1, stored={"anna": large}, stored_before={"bert": large}))
    broken("tenants_are_counted", History(1, miscounted=["job-1 waits, and its tenant's counters do not know it"]))


def test_pictures_of_a_batch_count_and_one_larger_than_the_quota_is_never_taken() -> None:
    limits = Limits(pictures={"anna": (10, 1.0)})
    batch = Call("batch", "anna", 0, 0.5, OK, 200, ids=("batch-1",), cost=10)
    end = Call("batch_end", "anna", 0, 9, OK, 200, "completed", about="batch-1")
    assert check(History(1, calls=[batch, end], limits=limits)) == []
    broken("limits_hold", History(1, calls=[replace(batch, cost=11), end], limits=limits))
    refused = Call("batch", "anna", 0, 0.5, REFUSED, 400, "quota_exceeded", cost=11)
    assert check(History(1, calls=[refused], limits=limits)) == []
    broken("refusals_are_due", History(1, calls=[replace(refused, cost=10)], limits=limits))
    broken("refusals_are_due", History(1, calls=[replace(refused, code="invalid_value")], limits=limits))

"""Redis read past the store: counts everything anew, holds it to the house's rules, and lets time pass.

Knows the keys that `core/jobs/lua/shared/record.lua` names. Shares no code with the store, so that both can be
wrong only apart.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import redis

LIVE = ("queued", "running")
LEVELS = (0, 3, 6, 9)
QUEUES = ("image", "text")


@dataclass(frozen=True)
class Books:
    """Everything that Redis holds about jobs, in one reading."""

    records: dict[str, dict[str, str]]
    streams: dict[str, list[tuple[str, dict[str, Any]]]]
    kept: dict[str, tuple[bool, bool]]  # whether record and stream stay for ever
    leases: dict[str, float]
    deadlines: dict[str, float]
    sent: dict[tuple[str, int], dict[str, float]]
    held: list[str]  # queued jobs whose messages are held back
    backlog: dict[str, dict[str, int]]
    listed: set[str]
    over: set[str]

    @classmethod
    def of(cls, client: redis.Redis) -> Books:
        queues = [name for queue in QUEUES for name in kombu_queues(client, queue)]
        found = json.loads(str(client.eval(_READ, 0, *queues)))
        records, streams, kept = {}, {}, {}
        for id, record, events, *ttl_ms in sorted(found["jobs"]):
            records[id] = dict(_pairs(record))
            fields = (dict(_pairs(event)) for _, event in events)
            streams[id] = [(event["type"], json.loads(event["data"])) for event in fields]
            kept[id] = ttl_ms[0] < 0, ttl_ms[1] < 0
        backlog, sent = {}, {}
        for queue, counts, *levels in found["queues"]:
            backlog[queue] = {name: int(count) for name, count in _pairs(counts)}
            for level, ids in zip(LEVELS, levels, strict=True):
                sent[queue, level] = _scores(ids)
        listed, over = ({entry.partition("|")[2] for entry in found[name]} for name in ("all jobs", "all ended"))
        leases, deadlines = _scores(found["leases"]), _scores(found["deadlines"])
        return cls(records, streams, kept, leases, deadlines, sent, list(found["held"]), backlog, listed, over)

    def check(self) -> None:
        """Every rule that holds at every moment, whatever happened."""
        recount: dict[str, Counter[str]] = defaultdict(Counter)
        for id, record in self.records.items():
            if record["state"] in LIVE:
                for queue in {record["modality"], kombu(record["modality"], record["model"])}:
                    recount[queue][record["state"]] += 1
                    recount[queue][record["state"] + "_ms"] += int(record["work_ms"])
                if id in self.held:
                    recount[kombu(record["modality"], record["model"])]["held"] += 1
        for queue in {*self.backlog, *recount}:
            for name in ("queued", "queued_ms", "running", "running_ms", "held"):
                assert self.backlog[queue].get(name, 0) == recount[queue][name], (queue, name)

        def those(*states: str) -> set[str]:
            return {id for id, record in self.records.items() if record["state"] in states}

        waiting = [id for ids in self.sent.values() for id in ids] + self.held
        assert sorted(waiting) == sorted(those("queued"))  # each in exactly one list
        for (queue, level), ids in self.sent.items():
            for id, sequence in ids.items():
                record = self.records[id]
                assert (kombu(record["modality"], record["model"]), record["level"], record["sequence"]) == (
                    queue,
                    str(level),
                    str(int(sequence)),
                )
        assert self.listed == set(self.records) and self.over == set(self.records) - those(*LIVE)
        assert set(self.leases) == those("running")
        assert set(self.deadlines) == {id for id in those(*LIVE) if "deadline" in self.records[id]}
        for id, record in self.records.items():
            assert self.kept[id] == (record["state"] in LIVE,) * 2
            states = [type for type, _ in self.streams[id] if type != "progress"]
            assert states[-1] == record["state"]
            assert states[0] == "queued"
            assert all(state in LIVE for state in states[:-1])  # the terminal one is the last
            if record["state"] not in LIVE:
                assert self.streams[id][-1][0] == record["state"]
            runs = [data["attempt"] for type, data in self.streams[id] if type == "running"]
            assert runs == list(range(1, int(record["attempt"]) + 1))


# One command and one answer: redis-py's parser would take most of the time of tests that read after each step.
_READ = """
local found = {jobs = {}, queues = {}, held = {}}
for _, key in ipairs(redis.call('KEYS', 'diptych:job:*')) do
  local id = string.sub(key, #'diptych:job:' + 1)
  local events = 'diptych:events:' .. id
  table.insert(found.jobs, {id, redis.call('HGETALL', key), redis.call('XRANGE', events, '-', '+'),
    redis.call('PTTL', key), redis.call('PTTL', events)})
end
for _, key in ipairs(redis.call('KEYS', 'diptych:flow:*')) do
  for _, id in ipairs(redis.call('ZRANGE', key, 0, -1)) do table.insert(found.held, id) end
end
for _, queue in ipairs(ARGV) do
  local told = {queue, redis.call('HGETALL', 'diptych:backlog:' .. queue)}
  for _, level in ipairs({LEVELS}) do
    table.insert(told, redis.call('ZRANGE', 'diptych:sent:' .. queue .. ':' .. level, 0, -1, 'WITHSCORES'))
  end
  table.insert(found.queues, told)
end
for _, name in ipairs({'leases', 'deadlines'}) do
  found[name] = redis.call('ZRANGE', 'diptych:' .. name, 0, -1, 'WITHSCORES')
end
for _, name in ipairs({'jobs', 'ended'}) do
  found['all ' .. name] = redis.call('ZRANGE', 'diptych:' .. name, 0, -1)
end
return cjson.encode(found)
""".replace("LEVELS", ", ".join(map(str, LEVELS)))


def _pairs(flat: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names and values that follow one another; what is empty is an object in Lua's JSON."""
    values = iter(flat)
    return zip(values, values, strict=True)


def _scores(flat: Sequence[str]) -> dict[str, float]:
    return {member: float(score) for member, score in _pairs(flat)}


_AGE = """
local ms = ARGV[1]
local function back(key, ...)
  for _, field in ipairs({...}) do
    if redis.call('HEXISTS', key, field) == 1 then redis.call('HINCRBY', key, field, -ms) end
  end
end
for _, key in ipairs(redis.call('KEYS', 'diptych:job:*')) do
  back(key, 'created', 'deadline', 'started', 'ended', 'sent', 'offered')
end
for _, key in ipairs(redis.call('KEYS', 'diptych:mark:*')) do back(key, 'since') end
for _, key in ipairs({'diptych:leases', 'diptych:deadlines', 'diptych:workers'}) do
  for _, member in ipairs(redis.call('ZRANGE', key, 0, -1)) do redis.call('ZINCRBY', key, -ms, member) end
end
if redis.call('EXISTS', 'diptych:swept') == 1 then redis.call('DECRBY', 'diptych:swept', ms) end
"""


def age(client: redis.Redis, seconds: float) -> None:
    """Let time pass without waiting: every moment that is written down moves into the past."""
    client.eval(_AGE, 0, round(seconds * 1000))


def kombu(queue: str, model: str) -> str:
    """The kombu queue of a model; of a record without a model that of older versions."""
    return f"{queue}.{model.replace('%', '%25').replace(':', '%3A')}" if model else queue


def kombu_queues(client: redis.Redis, queue: str) -> list[str]:
    """The kombu queues of a queue: that of older versions, and those of the models of which jobs wait or run."""
    models: Any = client.smembers(f"diptych:active:{queue}")
    return [queue, *(kombu(queue, model) for model in sorted(models))]


def push(client: redis.Redis, queue: str, level: int, id: str) -> None:
    """Send as kombu does: LPUSH; see test_broker."""
    client.lpush(f"{queue}:{level}" if level else queue, id)


def pop(client: redis.Redis, queue: str) -> str | None:
    """Receive as kombu does: the right end of the first list that holds something."""
    for level in LEVELS:
        id = client.rpop(f"{queue}:{level}" if level else queue)
        if id is not None:
            return str(id)
    return None

"""Redis read past the store: counts everything anew, holds it to the house's rules, and lets time pass.

Knows the keys that `core/jobs/lua/shared/transitions.lua` names. Shares no code with the store, so that both can be
wrong only apart.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
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
        ids = sorted(key.removeprefix("diptych:job:") for key in client.scan_iter("diptych:job:*", 1000))
        names = [name for queue in QUEUES for name in kombu_queues(client, queue)]
        held = [id for key in client.scan_iter("diptych:flow:*", 1000) for id in client.zrange(key, 0, -1)]
        with client.pipeline(transaction=False) as pipe:  # MULTI is refused when Redis is full
            for id in ids:
                pipe.hgetall(f"diptych:job:{id}")
                pipe.xrange(f"diptych:events:{id}")
                pipe.pttl(f"diptych:job:{id}")
                pipe.pttl(f"diptych:events:{id}")
            for queue in names:
                pipe.hgetall(f"diptych:backlog:{queue}")
                for level in LEVELS:
                    pipe.zrange(f"diptych:sent:{queue}:{level}", 0, -1, withscores=True)
            pipe.zrange("diptych:leases", 0, -1, withscores=True)
            pipe.zrange("diptych:deadlines", 0, -1, withscores=True)
            pipe.zrange("diptych:jobs", 0, -1)
            pipe.zrange("diptych:ended", 0, -1)
            answers = iter(pipe.execute())
        records, streams, kept = {}, {}, {}
        for id in ids:
            records[id] = next(answers)
            streams[id] = [(f["type"], json.loads(f["data"])) for _, f in next(answers)]
            kept[id] = next(answers) < 0, next(answers) < 0
        backlog, sent = {}, {}
        for queue in names:
            backlog[queue] = {k: int(v) for k, v in next(answers).items()}
            for level in LEVELS:
                sent[queue, level] = dict(next(answers))
        leases, deadlines = dict(next(answers)), dict(next(answers))
        listed, over = ({entry.partition("|")[2] for entry in next(answers)} for _ in range(2))
        return cls(records, streams, kept, leases, deadlines, sent, held, backlog, listed, over)

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

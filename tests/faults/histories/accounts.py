"""Reads Redis itself and compares what is counted for each tenant with its records, each time in one script.

Shares no code with the product's scripts, so that both can be wrong only apart.
"""

from __future__ import annotations

import json
from typing import Any

import redis

from core.jobs.broker import PRIORITY_STEPS, QUEUES, model_queue
from core.jobs.keys import PREFIX
from tests.faults.histories import planted
from tests.faults.histories.record import SMALL_BYTES, Stored
from tests.faults.histories.world import World

# Live jobs of an owner that are in no set of that owner's: {id, …}
_UNCOUNTED = """
local missing = {}
local function check(id, state, kombu)
  local v = redis.call('HMGET', 'diptych:job:' .. id, 'state', 'owner', 'modality')
  if v[1] ~= state or not v[2] or v[2] == '' then return end
  local out = redis.call('ZSCORE', 'diptych:out:' .. kombu .. ':' .. v[2], id)
  local waits = redis.call('SISMEMBER', 'diptych:waiting:' .. v[3] .. ':' .. v[2], id) == 1
  if not out or (state == 'queued' and not waits) then missing[#missing + 1] = id end
end
for _, pair in ipairs(cjson.decode(ARGV[1])) do
  for _, id in ipairs(redis.call('ZRANGE', 'diptych:sent:' .. pair[2], 0, -1)) do check(id, 'queued', pair[1]) end
end
return missing
"""

# Artifacts that more records name than are counted: "artifact counted records"
_UNNAMED = """
local named, missing = {}, {}
for _, key in ipairs(redis.call('KEYS', 'diptych:job:*')) do
  local v = redis.call('HMGET', key, 'artifacts', 'inputs')
  for artifact in string.gmatch((v[1] or '') .. ' ' .. (v[2] or ''), '%S+') do
    named[artifact] = (named[artifact] or 0) + 1
  end
end
for artifact, count in pairs(named) do
  local counted = tonumber(redis.call('HGET', 'diptych:naming', artifact)) or 0
  if counted < count then missing[#missing + 1] = artifact .. ' ' .. counted .. ' ' .. count end
end
return missing
"""

# Of an owner: the bytes of the largest record, and of all those that are not counted
_STORED = """
local largest, uncounted = 0, 0
local function weigh(member, ...)
  local bytes = 0
  for _, key in ipairs({...}) do
    for _, value in ipairs(redis.call('HVALS', key)) do bytes = bytes + #value end
  end
  local counted = tonumber(redis.call('ZSCORE', 'diptych:heavy:' .. ARGV[1], member)) or 0
  largest, uncounted = math.max(largest, bytes), uncounted + math.max(0, bytes - ARGV[2] - counted)
end
for _, entry in ipairs(redis.call('ZRANGE', 'diptych:jobs:' .. ARGV[1], 0, -1)) do
  local id = string.match(entry, '|(.*)$')
  if redis.call('HGET', 'diptych:job:' .. id, 'owner') == ARGV[1] then weigh(id, 'diptych:job:' .. id) end
end
for _, id in ipairs(redis.call('ZRANGE', 'diptych:batches:' .. ARGV[1], 0, -1)) do
  weigh('batch:' .. id, 'diptych:batch:' .. id, 'diptych:batch_done:' .. id)
end
return {largest, uncounted}
"""


def uncounted(world: World) -> list[str]:
    """Waiting jobs that no counter of their tenant's knows now. Empty where Redis does not answer."""
    try:
        with world.direct(world.servers[0]) as client:
            queues = [
                model_queue(queue, model)
                for queue in QUEUES
                for model in client.smembers(f"diptych:active:{queue}")
            ]  # fmt: skip
            pairs = [(queue, f"{queue}:{level}") for queue in queues for level in PRIORITY_STEPS]
            ids = client.eval(_UNCOUNTED, 0, json.dumps(pairs))
    except redis.RedisError:
        return []
    return [f"{id} waits, and its tenant's counters do not know it" for id in ids]


def unnamed(world: World) -> list[str]:
    """Artifacts that would be deleted although a record still names them."""
    with world.direct(world.servers[0]) as client:
        entries: Any = client.eval(_UNNAMED, 0)
    return [
        f"{artifact} is named by {count} records, and counted for {counted}"
        for artifact, counted, count in (entry.split() for entry in entries)
    ]


def stored(world: World) -> dict[str, Stored]:
    """What each tenant has left in Redis."""
    with world.direct(world.servers[0]) as client:
        return {name: left_by(client, owner) for name, owner in world.owners.items()}


def left_by(client: Any, owner: str) -> Stored:
    """What an owner has left in the Redis of this client."""
    return Stored(*client.eval(_STORED, 0, owner, SMALL_BYTES))


def hand_back_late(world: World) -> list[str]:
    """Hand back each running job with the token of an attempt that it no longer runs, as a worker does that was given
    up while it drained. Returns what was taken, which must be nothing.
    """
    taken, text = [], planted.text_of("jobs/hand_back", world.bug)
    with world.direct(world.servers[0]) as client:
        for id in client.zrange("diptych:leases", 0, 7):
            attempt, incarnation = client.hmget(f"diptych:job:{id}", "attempt", "incarnation")
            stale = f"{int(attempt or 1) - 1}@{incarnation or ''}"
            if attempt and client.eval(text, 0, PREFIX, id, stale):
                taken.append(f"{id} was handed back by attempt {int(attempt) - 1}, though {attempt} had begun")
    return taken

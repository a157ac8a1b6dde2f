"""Jobs whose end somebody wants to be told: kept from the very script that ends them until they were told, or given up.

Each owner has lanes, one a receiver, and is served in turn: however much waits for one, the next is another's. Knows
who is due and how often it was tried; knows nothing of how anybody is told.

    webhooks                   zset: job → when it ended; from here they go to their lanes
    webhook_tries              hash: job → how often telling it failed
    webhook_owners             zset: owner → when it is its turn
    webhook_lanes:{owner}      zset: receiver → when it is its turn
    webhooks:{owner}|{receiver}    zset: job → when it is told next
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

from core.config import Settings
from core.jobs.connection import Script, connect
from core.jobs.record import milliseconds, to_json
from core.jobs.scripts import PRELUDE

_INTAKE = 1000  # jobs that go to their lanes in one call

_LANES = """
local owners = P .. 'webhook_owners'

local function lanes_of(owner) return P .. 'webhook_lanes:' .. owner end
local function lane_of(owner, host) return P .. 'webhooks:' .. owner .. '|' .. host end

local function host_of(webhook)
  local url = webhook and cjson.decode(webhook).url
  return url and string.lower(string.match(url, '^%a+://([^/?#]*)') or '')
end

local function enter(owner, host, id, at)
  redis.call('ZADD', lane_of(owner, host), at, id)
  redis.call('ZADD', lanes_of(owner), 'LT', at, host)
  redis.call('ZADD', owners, 'LT', at, owner)
end

-- An entry of a list of turns goes behind all that wait now, or to when the first of what it stands for is due.
local function turn(list, entry, of, at)
  local first = redis.call('ZRANGE', of, 0, 0, 'WITHSCORES')
  if first[2] then
    redis.call('ZADD', list, math.max(first[2], at), entry)
  else
    redis.call('ZREM', list, entry)
  end
end
"""

# ms that whoever takes them has, limit, of one owner, of one lane, {owners: {…}, lanes: {…}} that get nothing now
# → job, tries, owner, receiver, incarnation, …: they come again after that time unless they are settled
_DUE = (
    PRELUDE
    + _LANES
    + f"local intake = {_INTAKE}"
    + """
let_through()
local at = now()
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'webhooks', '-inf', at, 'LIMIT', 0, intake)) do
  redis.call('ZREM', P .. 'webhooks', id)
  local v = redis.call('HMGET', P .. 'job:' .. id, 'owner', 'webhook')
  local host = host_of(v[2])
  if host then
    enter(v[1] or '', host, id, at)
  else
    redis.call('HDEL', P .. 'webhook_tries', id)  -- erased meanwhile
  end
end

local found, left, skipped = {}, tonumber(ARGV[3]), cjson.decode(ARGV[6])
local some = left + 100  -- of those that are skipped there are fewer
for _, owner in ipairs(redis.call('ZRANGEBYSCORE', owners, '-inf', at, 'LIMIT', 0, some)) do
  if left <= 0 then break end
  if not skipped.owners[owner] then
    local mine = math.min(left, tonumber(ARGV[4]))
    for _, host in ipairs(redis.call('ZRANGEBYSCORE', lanes_of(owner), '-inf', at, 'LIMIT', 0, some)) do
      if mine <= 0 then break end
      if not skipped.lanes[owner .. '|' .. host] then
        local lane = lane_of(owner, host)
        local most = math.min(mine, tonumber(ARGV[5]))
        for _, id in ipairs(redis.call('ZRANGEBYSCORE', lane, '-inf', at, 'LIMIT', 0, most)) do
          local v = redis.call('HMGET', P .. 'job:' .. id, 'state', 'owner', 'webhook', 'incarnation')
          if not v[1] or v[1] == 'queued' or v[1] == 'running' or (v[2] or '') ~= owner or host_of(v[3]) ~= host
              or redis.call('ZSCORE', P .. 'webhooks', id) then
            redis.call('ZREM', lane, id)  -- of a job that is gone: who has its id now is told of at a place of its own
            if not v[1] then redis.call('HDEL', P .. 'webhook_tries', id) end
          else
            redis.call('ZADD', lane, at + ARGV[2], id)
            local tries = redis.call('HGET', P .. 'webhook_tries', id) or '0'
            for _, value in ipairs({id, tries, owner, host, v[4] or ''}) do found[#found + 1] = value end
            mine, left = mine - 1, left - 1
          end
        end
        turn(lanes_of(owner), host, lane, at)
      end
    end
    turn(owners, owner, lanes_of(owner), at)
  end
end
return found
"""
)

# job, owner, receiver, ms until it is tried again or '': it is settled, whether that was a try (1 or 0), retention_ms,
# incarnation. Of another job that has the id by now nothing is touched.
# A job's record was kept until it is settled, and goes as others from then on.
_SETTLE = (
    PRELUDE
    + _LANES
    + """
local id, owner, host, at = ARGV[2], ARGV[3], ARGV[4], now()
local lane = lane_of(owner, host)
local v = redis.call('HMGET', P .. 'job:' .. id, 'state', 'incarnation', 'ended', 'owner')
if v[1] and (v[2] or '') ~= ARGV[8] then return end
if ARGV[5] == '' or not v[1] then
  redis.call('ZREM', lane, id)
  redis.call('HDEL', P .. 'webhook_tries', id)
  turn(lanes_of(owner), host, lane, at)
  turn(owners, owner, lanes_of(owner), at)
  if v[3] then
    redis.call('PEXPIREAT', P .. 'job:' .. id, v[3] + ARGV[7])
    redis.call('ZADD', P .. 'ended', 'XX', v[3] + ARGV[7], (v[4] or '') .. '|' .. id)
  end
elseif redis.call('ZSCORE', lane, id) then
  if ARGV[6] == '1' then redis.call('HINCRBY', P .. 'webhook_tries', id, 1) end
  enter(owner, host, id, at + ARGV[5])
end
"""
)


@dataclass(frozen=True, slots=True)
class Due:
    """A job whose end is to be told now, and how often that failed. `host` is the receiver's, with its port.

    Another job may have its id when that was told: nothing that is said of this one is taken for that one's.
    """

    id: str
    tries: int
    owner: str
    host: str
    incarnation: str = ""


class Webhooks:
    """Thread-safe; connects at its first command. Every method raises `StoreDown` or `StoreFull`.

    `retention_s`: how long the record of a job that ended is kept, once that was told.
    """

    def __init__(self, url: str, *, retention_s: float = 86_400.0) -> None:
        self._client = connect(url)
        self._due = Script(self._client, _DUE)
        self._settle = Script(self._client, _SETTLE)
        self._retention_ms = milliseconds(retention_s)

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(settings.redis_url, retention_s=settings.retention_s)

    def close(self) -> None:
        """Give the connections back. A later call would open new ones."""
        self._client.close()

    def due(
        self,
        within_s: float,
        limit: int = 20,
        *,
        of_owner: int = 20,
        of_lane: int = 20,
        without: Collection[str] = (),
        without_lanes: Collection[tuple[str, str]] = (),
    ) -> list[Due]:
        """Jobs whose end is to be told now, of all owners and receivers in turn; nobody else gets them `within_s`.

        Nothing of the owners, and of the lanes (owner and receiver), that are named.
        """
        skipped = {
            "owners": dict.fromkeys(without, True),
            "lanes": {f"{owner}|{host}": True for owner, host in without_lanes},
        }
        flat: Any = self._due(milliseconds(within_s), limit, of_owner, of_lane, to_json(skipped))
        return [
            Due(id, int(tries), owner, host, incarnation)
            for id, tries, owner, host, incarnation in zip(*(flat[k::5] for k in range(5)), strict=True)
        ]

    def settle(self, due: Due) -> None:
        """It was told, or is given up."""
        self._settle(due.id, due.owner, due.host, "", 0, self._retention_ms, due.incarnation)

    def again(self, due: Due, after_s: float, *, failed: bool = True) -> None:
        """It could not be told, and is tried again. Not `failed`: nobody tried."""
        after_ms = milliseconds(after_s)
        self._settle(due.id, due.owner, due.host, after_ms, int(failed), self._retention_ms, due.incarnation)

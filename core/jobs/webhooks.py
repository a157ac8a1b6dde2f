"""Jobs whose end somebody wants to be told: kept from the very script that ends them until they were told, or given up.

Knows who is due and how often it was tried; knows nothing of how anybody is told.

    webhooks         zset: job → when it is told next
    webhook_tries    hash: job → how often that failed
"""

from __future__ import annotations

from typing import Any, Self

from core.config import Settings
from core.jobs.connection import Script, connect

# ms that whoever takes them has, limit → job, tries, …: they come again after that time unless they are settled
_DUE = """
local P = ARGV[1]
local t = redis.call('TIME')
local at = t[1] * 1000 + math.floor(t[2] / 1000)
local found = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'webhooks', '-inf', at, 'LIMIT', 0, ARGV[3])) do
  redis.call('ZADD', P .. 'webhooks', at + ARGV[2], id)
  found[#found + 1] = id
  found[#found + 1] = redis.call('HGET', P .. 'webhook_tries', id) or '0'
end
return found
"""

# job, ms until it is tried again or '': it is settled
_SETTLE = """
local P = ARGV[1]
if ARGV[3] == '' then
  redis.call('ZREM', P .. 'webhooks', ARGV[2])
  redis.call('HDEL', P .. 'webhook_tries', ARGV[2])
elseif redis.call('ZSCORE', P .. 'webhooks', ARGV[2]) then
  local t = redis.call('TIME')
  redis.call('ZADD', P .. 'webhooks', t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[3], ARGV[2])
  redis.call('HINCRBY', P .. 'webhook_tries', ARGV[2], 1)
end
"""


class Webhooks:
    """Thread-safe; connects at its first command. Every method raises `StoreDown` or `StoreFull`."""

    def __init__(self, url: str) -> None:
        self._client = connect(url)
        self._due = Script(self._client, _DUE)
        self._settle = Script(self._client, _SETTLE)

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(settings.redis_url)

    def close(self) -> None:
        """Give the connections back. A later call would open new ones."""
        self._client.close()

    def due(self, within_s: float, limit: int = 20) -> list[tuple[str, int]]:
        """Jobs whose end is to be told now, and how often that failed; nobody else gets them `within_s`."""
        flat: Any = self._due(round(1000 * within_s), limit)
        return [(id, int(tries)) for id, tries in zip(flat[::2], flat[1::2], strict=True)]

    def settle(self, id: str) -> None:
        """It was told, or is given up."""
        self._settle(id, "")

    def again(self, id: str, after_s: float) -> None:
        """It could not be told, and is tried again."""
        self._settle(id, round(1000 * after_s))

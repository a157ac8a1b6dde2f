"""Checks that the Redis user may run every command that the service uses, without running any.

Lists the commands of the scripts, stores and kombu, by the keys that they access; docs/operations.md lists the rights
to grant.
"""

from __future__ import annotations

from typing import Any, Final

import redis

from core.jobs.broker import PRIORITY_STEPS, QUEUES, list_key, model_queue, own_queue
from core.jobs.connection import RedisStore, translate_redis_errors
from core.jobs.keys import PREFIX

WHERE: Final = "'Redis over TLS, and its rights' in docs/operations.md tells which it needs"
_SAID: Final = 5  # missing rights named in one sentence

# <key>: one under each name. kombu reads its queues' lists, and keeps unacknowledged messages and bindings.
_OURS: Final = """
DEL <key>|EXISTS <key>|GET <key>|SET <key> x|INCR <key>|INCRBY <key> 1|MGET <key>
PEXPIRE <key> 1|PEXPIREAT <key> 1|PTTL <key>
HDEL <key> x|HEXISTS <key> x|HGET <key> x|HGETALL <key>|HINCRBY <key> x 1|HKEYS <key>|HLEN <key>|HMGET <key> x
HSET <key> x x|HSETNX <key> x x|HSTRLEN <key> x|LPUSH <key> x|LTRIM <key> 0 0
SADD <key> x|SCARD <key>|SMEMBERS <key>|SRANDMEMBER <key>|SREM <key> x
XADD <key> * x x|XDEL <key> 0-1|XRANGE <key> - +|XREAD STREAMS <key> 0
ZADD <key> 1 x|ZCARD <key>|ZCOUNT <key> 0 0|ZRANGE <key> 0 0|ZRANGEBYSCORE <key> 0 0|ZRANK <key> x|ZREM <key> x
ZREMRANGEBYSCORE <key> 0 0|ZREVRANGE <key> 0 0|ZREVRANK <key> x|ZSCORE <key> x
EVAL x 0|EVALSHA x 0|SCRIPT LOAD x|INFO|PING|SCAN 0|TIME
"""
_LISTS: Final = "BRPOP <key> 1|DEL <key>|EXISTS <key>|LLEN <key>|LPUSH <key> x|PEXPIRE <key> 1"
_KOMBU: Final = (
    ("_kombu.binding.image", "SADD <key> x|SMEMBERS <key>"),
    ("unacked", "HDEL <key> x|HGET <key> x|HSET <key> x x"),
    ("unacked_index", "ZADD <key> 1 x|ZREM <key> x|ZREVRANGEBYSCORE <key> 0 0"),
    ("unacked_mutex", "SET <key> x"),
)
_LISTED: Final = tuple(
    (list_key(each, step), _LISTS)
    for queue in QUEUES
    for each in (queue, model_queue(queue, "model"), own_queue(queue, "worker"))
    for step in PRIORITY_STEPS
)


def _commands() -> list[tuple[str, tuple[str, ...]]]:
    """Each command's name as reported when it is missing, and its arguments."""
    commands = []
    for key, texts in ((f"{PREFIX}rights", _OURS), *_LISTED, *_KOMBU):
        for text in texts.replace("\n", "|").strip("|").split("|"):
            words = tuple(key if word == "<key>" else word for word in text.split())
            commands.append((f"{words[0]} on {key}" if key in words else words[0], words))
    return commands


class RedisPermissions(RedisStore):
    """The rights of the client's user."""

    @translate_redis_errors()
    def missing(self) -> list[str]:
        """List the commands, with keys, that Redis refuses to this user. Raises `StoreDown`.

        The commands are queued in a transaction (Redis checks rights there), which is then abandoned with its
        connection.
        """
        pool = self._client.connection_pool
        connection: Any = pool.get_connection()
        try:
            connection.send_command("MULTI")
            if isinstance(_answer(connection), redis.exceptions.NoPermissionError):
                return ["MULTI"]
            named = _commands()
            connection.send_packed_command(connection.pack_commands([words for _, words in named]))
            answers = [_answer(connection) for _ in named]
        finally:
            connection.disconnect()
            pool.release(connection)
        return [
            name
            for (name, _), answer in zip(named, answers, strict=True)
            if isinstance(answer, redis.exceptions.NoPermissionError)
        ]


def describe_missing(missing: list[str]) -> str:
    """A sentence that names missing rights."""
    more = f" and {len(missing) - _SAID} more" if len(missing) > _SAID else ""
    return f"Redis refuses {', '.join(missing[:_SAID])}{more} to this service's user; {WHERE}"


def _answer(connection: Any) -> Any:
    try:
        return connection.read_response()
    except redis.ResponseError as error:
        return error

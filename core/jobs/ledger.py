"""The Lua of whose a job is, where it stands among others, and how long what it made is kept.

As scripts.py, whose transitions it leans on: one prefix, one clock. Knows keys and times; what
files and batches hold is in holding.py.

    jobs, jobs:{owner}     zset: owner|job → when it was made
    ended                  zset: owner|job → when its record goes
    withdrawn:{id}         no job of this id is to be made any more, for an hour
    barred:{owner}         there is one for a day after a key was revoked whose jobs were to end: none is made for it
    kept                   zset: artifact → when it may go
    naming                 hash: artifact → how many records name it
    needed                 hash: artifact → how many live jobs begin with it
    going                  zset: artifact that is being deleted → since when
"""

from __future__ import annotations

from core.jobs.holding import HOLDING
from core.jobs.scripts import PRELUDE

_GOING_MS = 60_000  # after so long who was deleting it has died
_NEEDED_MS = 600_000  # until it is looked at again whether a live job still needs what it begins with

# id → {jobs that are called before it, jobs queued, their ms, jobs running, their ms}; or nothing: it does not wait.
STANDING = (
    PRELUDE
    + """
local job = read(ARGV[2])
if not job or job.state ~= 'queued' then return false end
local ahead = redis.call('ZRANK', P .. 'sent:' .. job.queue .. ':' .. job.level, job.id) or 0
for i = 3, #ARGV do
  if tonumber(ARGV[i]) < tonumber(job.level) then
    ahead = ahead + redis.call('ZCARD', P .. 'sent:' .. job.queue .. ':' .. ARGV[i])
  end
end
local b = redis.call('HMGET', P .. 'backlog:' .. job.queue, 'queued', 'queued_ms', 'running', 'running_ms')
return {ahead, b[1] or '0', b[2] or '0', b[3] or '0', b[4] or '0'}
"""
)

# owner ('*': everybody's), state or '', model or '', limit, id to go on after or '', entries to look at, first rank
# → {the last id that was looked at or '', whether there may be more, the rank to go on at, id, …}, newest first;
#   or 0: nothing to go on after. Entries whose record is gone are dropped on the way.
LIST = (
    PRELUDE
    + """
local index = ARGV[2] == '*' and P .. 'jobs' or P .. 'jobs:' .. ARGV[2]
local state, model, limit, looks = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[7])
local from = tonumber(ARGV[8])
if ARGV[6] ~= '' and from == 0 then
  local owner = redis.call('HGET', P .. 'job:' .. ARGV[6], 'owner')
  local rank = owner and redis.call('ZREVRANK', index, owner .. '|' .. ARGV[6])
  if not rank then return 0 end
  from = rank + 1
end
local found, last, looked = {}, '', 0
while looked < looks do
  local entries = redis.call('ZREVRANGE', index, from, from + 99)
  for _, entry in ipairs(entries) do
    local owner, id = string.match(entry, '^([^|]*)|(.*)$')
    local v = redis.call('HMGET', P .. 'job:' .. id, 'state', 'model', 'owner')
    if v[3] ~= owner then v = {} end  -- the id is another's by now
    if v[1] and (state == '' or v[1] == state) and (model == '' or v[2] == model) then
      if #found >= limit then return {last, '1', from, unpack(found)} end
      found[#found + 1] = id
    end
    -- A Redis that takes no writes now lists all the same.
    local dropped = not v[1] and redis.pcall('ZREM', P .. 'jobs:' .. owner, entry)
    if type(dropped) == 'number' then
      redis.pcall('ZREM', P .. 'jobs', entry)
    else
      from = from + 1
    end
    if v[1] then last = id end
    looked = looked + 1
  end
  if #entries < 100 then return {last, '0', from, unpack(found)} end
end
return {last, '1', from, unpack(found)}
"""
)

# id, retention_ms, keep_ms, incarnation or '' → 1, or 0: unknown
ERASE = (
    PRELUDE
    + HOLDING
    + """
let_through()
local job, at = read_same(ARGV[2], ARGV[5]), now()
if not job then return 0 end
local keep_ms = ARGV[4] + kept_ms(job, ARGV[3]) - ARGV[3]
if job.state == 'queued' or job.state == 'running' then
  finish(job, 'cancelled', 'cancel', at, ARGV[3])
  if job.state == 'running' then tell_to_cancel(job) end
  redis.call('PEXPIRE', P .. 'events:' .. job.id, 60000)  -- who follows it is told
else
  redis.call('DEL', P .. 'events:' .. job.id)
end
for artifact in string.gmatch((redis.call('HGET', job.key, 'artifacts') or '') .. ' ' .. job.inputs, '%S+') do
  if redis.call('HINCRBY', P .. 'naming', artifact, -1) <= 0 then
    redis.call('HDEL', P .. 'naming', artifact)
    local score = redis.call('ZSCORE', P .. 'kept', artifact)
    -- Somebody may have made the same just now, and name it in a moment.
    local until_ms = math.max(at, held_until(artifact, at), (score or 0) - keep_ms + named_ms)
    if score then redis.call('ZADD', P .. 'kept', until_ms, artifact) end
  end
end
redis.call('DEL', job.key)
for _, list in ipairs({'ended', 'jobs', 'jobs:' .. job.owner}) do
  redis.call('ZREM', P .. list, job.owner .. '|' .. job.id)
end
return 1
"""
)

# id → nothing. A call that makes it and is still under way makes nothing; what it has made already is left to ERASE.
WITHDRAW = (
    PRELUDE
    + """
let_through()
redis.call('SET', P .. 'withdrawn:' .. ARGV[2], '', 'PX', 3600000)
"""
)

# queue, retention_ms, limit, level, … → how many of its waiting jobs were cancelled, the most urgent first
EMPTY = (
    PRELUDE
    + """
let_through()
local at, cancelled = now(), 0
for i = 5, #ARGV do
  local sent, ids = P .. 'sent:' .. ARGV[2] .. ':' .. ARGV[i], nil
  repeat
    ids = redis.call('ZRANGE', sent, 0, ARGV[4] - 1 - cancelled)
    for _, id in ipairs(ids) do
      local job = read(id)
      if job and legible(job) then
        finish(job, 'cancelled', 'cancel', at, ARGV[3])
        cancelled = cancelled + 1
      else  -- deleted by hand, or damaged: it waits no more
        redis.call('ZREM', sent, id)
      end
    end
    if cancelled >= tonumber(ARGV[4]) then return cancelled end
  until #ids == 0
end
return cancelled
"""
)

# keep_ms, artifact, '1': whatever jobs are erased meanwhile → 1: it may be made, and stays so long at least; 0: it is
# being deleted at this moment
KEEP = (
    PRELUDE
    + HOLDING
    + """
let_through()
if redis.call('ZSCORE', P .. 'going', ARGV[3]) then return 0 end
local at = now()
if ARGV[4] == '1' then
  hold(ARGV[3], 'upload', at + ARGV[2], at)
elseif redis.call('ZADD', P .. 'kept', 'GT', 'CH', at + ARGV[2], ARGV[3]) == 0 then
  -- It is there, for longer: who lets it go meanwhile must know that it is made again.
  hold(ARGV[3], 'made', at + named_ms, at)
end
return 1
"""
)

# limit → artifacts to delete
DUE = (
    PRELUDE
    + f"local going_ms, needed_ms = {_GOING_MS}, {_NEEDED_MS}"
    + """
let_through()
local at = now()
local due = redis.call('ZRANGEBYSCORE', P .. 'going', '-inf', at - going_ms, 'LIMIT', 0, ARGV[2])
for _, artifact in ipairs(redis.call('ZRANGEBYSCORE', P .. 'kept', '-inf', at, 'LIMIT', 0, ARGV[2] - #due)) do
  if redis.call('HEXISTS', P .. 'needed', artifact) == 1 then
    redis.call('ZADD', P .. 'kept', at + needed_ms, artifact)
  else
    redis.call('ZREM', P .. 'kept', artifact)
    redis.call('HDEL', P .. 'naming', artifact)
    due[#due + 1] = artifact
  end
end
for _, artifact in ipairs(due) do redis.call('ZADD', P .. 'going', at, artifact) end
return due
"""
)

# artifact, … that are deleted
GONE = (
    PRELUDE
    + """
redis.call('ZREM', P .. 'going', unpack(ARGV, 2))
"""
)

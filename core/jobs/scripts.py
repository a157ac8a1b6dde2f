"""The Lua in which every change of a job's state is made: atomic, and by one clock, Redis's own.

Knows keys, fields and transitions; JSON passes through unread. Knows nothing of connections or of Python's types.

Keys, all under the prefix that every script gets as ARGV[1] (they are put together here, so Redis Cluster is not
supported); times are milliseconds since the epoch:

    job:{id}               hash: the record (see `record.Job`), and our own `level sequence sent claim by graced`
    preview:{id}           hash: the newest look at each of its pictures, for a minute
    events:{id}            stream of `type`, `data`; the terminal event is the last
    leases                 zset: running job → when its lease ends
    deadlines              zset: live job that has one → its deadline
    sent:{queue}:{level}   zset: queued job → sequence, in the order in which their messages were sent
    mark:{queue}:{level}   hash: `highest` sequence that was ever claimed; `checkpoint`, what it was at `since`
    backlog:{queue}        hash: queued, queued_ms, running, running_ms: always what counting the records would give
    waiting:{queue}:{owner}  set: a key's jobs that are queued; a process of an older version may leave some behind
    sequence, swept        the last sequence given; when anybody last swept
    workers                zset: worker → heartbeat;  worker:{id}: its card, with a time to live;  models: hash of cards
    control:{worker}       stream of messages to a worker
    paused                 set: queues from which no worker takes anything
    and those of ledger.py: who a job belongs to, and how long what it made is kept; the counters of rates.py; and the
    lists of messages, as kombu keeps them (broker.py)

On a full Redis (`noeviction`) a script's first write is refused if it could need memory; after a first write of
another kind all others go through. So what makes a job (creation.py) begins with one that is refused, and makes nothing
by halves; whatever ends a job, or keeps it going, begins with one that is not.
"""

from __future__ import annotations

PRELUDE = """
local P = ARGV[1]

local function now()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- As a first write it lets all others through on a full Redis; it removes nothing.
local function let_through()
  redis.call('ZREM', P .. 'leases', '')
end

local function read(id)
  local key = P .. 'job:' .. id
  local v = redis.call('HMGET', key, 'state', 'modality', 'level', 'sequence', 'sent', 'attempt', 'lost', 'work_ms',
    'worker', 'deadline', 'claim', 'by', 'owner', 'webhook', 'inputs', 'digest')
  if not v[1] then return nil end
  return {id = id, key = key, state = v[1], queue = v[2], level = v[3], sequence = v[4], sent = v[5], attempt = v[6],
    lost = v[7], work_ms = v[8], worker = v[9], deadline = v[10], claim = v[11], by = v[12],
    owner = v[13] or '', webhook = v[14], inputs = v[15] or '', digest = v[16] or ''}
end

-- How long what has ended is kept. What a batch asked for stays until that has read it, even if no API runs for a day.
local function kept_ms(job, retention_ms)
  if string.sub(job.digest, 1, 6) == 'batch_' then return math.max(retention_ms, 172800000) end
  return retention_ms
end

local function count(job, state, n)
  local key = P .. 'backlog:' .. job.queue
  redis.call('HINCRBY', key, state, n)
  redis.call('HINCRBY', key, state .. '_ms', n * job.work_ms + 0)  -- + 0: Redis takes no -0
end

local function emit(id, type, data)
  redis.call('XADD', P .. 'events:' .. id, '*', 'type', type, 'data', data)
end

-- Takes a live job out of where it stands. Its first write frees memory.
local function leave(job)
  if job.state == 'queued' then
    redis.call('ZREM', P .. 'sent:' .. job.queue .. ':' .. job.level, job.id)
    if job.owner ~= '' then redis.call('SREM', P .. 'waiting:' .. job.queue .. ':' .. job.owner, job.id) end
  else
    redis.call('ZREM', P .. 'leases', job.id)
  end
  count(job, job.state, -1)
end

-- Notes that a job's message is being sent now.
local function post(job, level, at)
  local sequence = redis.call('INCR', P .. 'sequence')
  redis.call('HSET', job.key, 'level', level, 'sequence', sequence, 'sent', at)
  redis.call('ZADD', P .. 'sent:' .. job.queue .. ':' .. level, sequence, job.id)
  if job.owner ~= '' then redis.call('SADD', P .. 'waiting:' .. job.queue .. ':' .. job.owner, job.id) end
end

local function requeue(job, by, at, reason)
  leave(job)
  redis.call('HSET', job.key, 'state', 'queued', 'worker', '', 'by', by)
  redis.call('HDEL', job.key, 'started', 'progress', 'claim')
  count(job, 'queued', 1)
  post(job, 0, at)
  emit(job.id, 'queued', '{"reason":"' .. reason .. '"}')
end

-- The one end of every job.
local function finish(job, state, by, at, retention_ms, field, value)
  retention_ms = kept_ms(job, retention_ms)
  leave(job)
  redis.call('ZREM', P .. 'deadlines', job.id)
  redis.call('DEL', P .. 'preview:' .. job.id)
  redis.call('HSET', job.key, 'state', state, 'ended', at, 'by', by)
  if field then redis.call('HSET', job.key, field, value) end
  emit(job.id, state, field == 'error' and value or '{}')
  redis.call('PEXPIRE', job.key, retention_ms)
  redis.call('ZADD', P .. 'ended', at + retention_ms, job.owner .. '|' .. job.id)
  if job.webhook then redis.call('ZADD', P .. 'webhooks', at, job.id) end
  for artifact in string.gmatch(job.inputs, '%S+') do  -- kept from now on as what was made is
    if redis.call('HINCRBY', P .. 'needed', artifact, -1) <= 0 then redis.call('HDEL', P .. 'needed', artifact) end
    redis.call('ZADD', P .. 'kept', 'GT', at + retention_ms + 3600000, artifact)
  end
  -- Who follows a job that has ended is told from its record: its events, half of what it takes, can go sooner.
  redis.call('PEXPIRE', P .. 'events:' .. job.id, math.min(retention_ms, 3600000))
end

local function expire(job, by, at, retention_ms)
  finish(job, 'expired', by, at, retention_ms, 'error',
    '{"code":"expired","message":"the deadline passed before the job was done"}')
end

local function tell_to_cancel(worker, id)
  local key = P .. 'control:' .. worker
  redis.call('XADD', key, 'MAXLEN', '~', 1000, '*', 'cancel', id)
  redis.call('PEXPIRE', key, 3600000)  -- of a worker that died
end
"""

# id, worker, token of this call, lease_ms, retention_ms
# → attempt, modality, model, parameters, priority, ms to the deadline or '', suspect, trace, request id; or nothing.
CLAIM = (
    PRELUDE
    + """
local job, token, at = read(ARGV[2]), ARGV[4], now()
if not job then return false end
if job.state == 'queued' then
  if job.deadline and tonumber(job.deadline) <= at then
    expire(job, 'claim', at, ARGV[6])
    return false
  end
  leave(job)
  local mark = P .. 'mark:' .. job.queue .. ':' .. job.level
  local highest = redis.call('HGET', mark, 'highest')
  if not highest or tonumber(highest) < tonumber(job.sequence) then
    redis.call('HSET', mark, 'highest', job.sequence)
  end
  local attempt = job.attempt + 1
  redis.call('HSET', job.key, 'state', 'running', 'attempt', attempt, 'worker', ARGV[3], 'started', at,
    'claim', token, 'by', 'claim')
  redis.call('HDEL', job.key, 'graced')
  redis.call('ZADD', P .. 'leases', at + ARGV[5], job.id)
  count(job, 'running', 1)
  emit(job.id, 'running', '{"attempt":' .. attempt .. '}')
elseif job.state ~= 'running' or job.claim ~= token then  -- else the call was repeated: its answer got lost
  return false
end
local v = redis.call('HMGET', job.key, 'attempt', 'modality', 'model', 'parameters', 'priority', 'suspect', 'trace',
  'request_id')
return {v[1], v[2], v[3], v[4], v[5], job.deadline and job.deadline - at or '', v[6] or '0', v[7] or '', v[8] or ''}
"""
)

# worker, lease_ms, then id, attempt, … → the ids that are not this worker's.
RENEW = (
    PRELUDE
    + """
let_through()
local stale, until_ms = {}, now() + ARGV[3]
for i = 4, #ARGV, 2 do
  local job = read(ARGV[i])
  if job and job.state == 'running' and job.worker == ARGV[2] and job.attempt == ARGV[i + 1] then
    redis.call('ZADD', P .. 'leases', until_ms, job.id)
    redis.call('HDEL', job.key, 'graced')
  else
    stale[#stale + 1] = ARGV[i]
  end
end
return stale
"""
)

# id, attempt, data, count, then of so many values: picture, preview, …; … → the ids whose attempt does not run.
REPORT = (
    PRELUDE
    + """
local stale = {}
local i = 2
while i <= #ARGV do
  local job, looks = read(ARGV[i]), tonumber(ARGV[i + 3])
  if job and job.state == 'running' and job.attempt == ARGV[i + 1] then
    if looks > 0 then
      redis.call('HSET', P .. 'preview:' .. job.id, unpack(ARGV, i + 4, i + 3 + looks))
      redis.call('PEXPIRE', P .. 'preview:' .. job.id, 60000)
    end
    redis.call('XADD', P .. 'events:' .. job.id, 'MAXLEN', '~', 1000, '*', 'type', 'progress', 'data', ARGV[i + 2])
    redis.call('HSET', job.key, 'progress', ARGV[i + 2])
  else
    stale[#stale + 1] = ARGV[i]
  end
  i = i + 4 + looks
end
return stale
"""
)

# id, attempt, state, retention_ms, and for some: field, value, keys of artifacts with spaces between
# → 1, or 0: refused. Repeating it is harmless.
FINISH = (
    PRELUDE
    + """
local job, state = read(ARGV[2]), ARGV[4]
if not job or job.attempt ~= ARGV[3] then return 0 end
if job.state == 'running' then
  if state == 'expired' then
    expire(job, 'worker', now(), ARGV[5])
  else
    local at = now()
    finish(job, state, 'worker', at, ARGV[5], ARGV[6], ARGV[7])
    if ARGV[8] and ARGV[8] ~= '' then
      redis.call('HSET', job.key, 'artifacts', ARGV[8])
      for artifact in string.gmatch(ARGV[8], '%S+') do
        redis.call('HINCRBY', P .. 'naming', artifact, 1)
        redis.call('ZADD', P .. 'kept', 'GT', at + kept_ms(job, ARGV[5]) + 3600000, artifact)
      end
    end
  end
  return 1
end
return job.state == state and job.by == 'worker' and 1 or 0
"""
)

# id, attempt → the queue, or nothing: refused. Repeating it is harmless.
HAND_BACK = (
    PRELUDE
    + """
local job = read(ARGV[2])
if not job or job.attempt ~= ARGV[3] then return false end
if job.state == 'running' then
  requeue(job, 'worker', now(), 'handed_back')
elseif job.state ~= 'queued' or job.by ~= 'worker' then
  return false
end
return job.queue
"""
)

# id, retention_ms → the record's fields afterwards; none if it is unknown.
CANCEL = (
    PRELUDE
    + """
local job = read(ARGV[2])
if job and (job.state == 'queued' or job.state == 'running') then
  finish(job, 'cancelled', 'cancel', now(), ARGV[3])
  if job.state == 'running' then tell_to_cancel(job.worker, job.id) end
end
return redis.call('HGETALL', P .. 'job:' .. ARGV[2])
"""
)

# limit, lease_ms, max_attempts, retention_ms, resend_ms, overtime_ms, silence_ms, then queue, level, kombu's list, …
# → {id, queue, …} to send at priority 0, {id, …} expired, {id, …} failed
SWEEP = (
    PRELUDE
    + """
let_through()
local limit, lease_ms, max_attempts, retention_ms = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local resend_ms, overtime_ms, silence_ms = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local at, leases = now(), P .. 'leases'
local send, expired, failed = {}, {}, {}

local function to_send(job)
  send[#send + 1] = job.id
  send[#send + 1] = job.queue
end

-- The jobs that a zset names; what has no record (somebody deleted it by hand) is dropped from it.
local function jobs(zset, ...)
  local found = {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', zset, '-inf', ...)) do
    local job = read(id)
    if job then found[#found + 1] = job else redis.call('ZREM', zset, id) end
  end
  return found
end

-- Nobody swept for long: most likely Redis was away, and workers could not renew. Once they get another lease.
local last = redis.call('GET', P .. 'swept')
redis.call('SET', P .. 'swept', at)
if last and at - last > silence_ms then
  for _, job in ipairs(jobs(leases, at + lease_ms)) do
    if redis.call('HSETNX', job.key, 'graced', 1) == 1 then
      redis.call('ZADD', leases, at + lease_ms, job.id)
    end
  end
end

-- Deadlines that passed. A worker gets a moment to say so itself.
for _, job in ipairs(jobs(P .. 'deadlines', at, 'LIMIT', 0, limit)) do
  if job.state == 'queued' or job.deadline + overtime_ms <= at then
    expire(job, 'sweep', at, retention_ms)
    if job.state == 'running' then tell_to_cancel(job.worker, job.id) end
    expired[#expired + 1] = job.id
  end
end

-- Leases that ran out.
for _, job in ipairs(jobs(leases, at, 'LIMIT', 0, limit)) do
  local lost = job.lost + 1
  redis.call('HSET', job.key, 'lost', lost, 'suspect', 1)
  if lost >= max_attempts then
    local who = lost == 1 and 'a worker stopped answering while it ran' or
      lost .. ' workers stopped answering while they ran'
    finish(job, 'failed', 'sweep', at, retention_ms, 'error', '{"code":"crashed","message":"' .. who .. ' this job"}')
    failed[#failed + 1] = job.id
  else
    requeue(job, 'sweep', at, 'worker_lost')
    to_send(job)
  end
end

-- Records whose time is up are gone by themselves; what lists them is told here.
for _, entry in ipairs(redis.call('ZRANGEBYSCORE', P .. 'ended', '-inf', at, 'LIMIT', 0, limit)) do
  local owner, id = string.match(entry, '^([^|]*)|(.*)$')
  redis.call('ZREM', P .. 'ended', entry)
  if redis.call('EXISTS', P .. 'job:' .. id) == 0 then
    redis.call('ZREM', P .. 'jobs', entry)
    redis.call('ZREM', P .. 'jobs:' .. owner, entry)
  end
end

-- Messages that got lost: Celery's list is empty, or one that was sent later has been claimed for a while.
local left = limit
for i = 9, #ARGV, 3 do
  local queue, level = ARGV[i], ARGV[i + 1]
  local sent, mark = P .. 'sent:' .. queue .. ':' .. level, P .. 'mark:' .. queue .. ':' .. level
  local below = redis.call('EXISTS', ARGV[i + 2]) == 0 and '+inf' or nil
  if not below then
    local m = redis.call('HMGET', mark, 'highest', 'checkpoint', 'since')
    if m[1] and (not m[3] or at - m[3] >= resend_ms) then
      if m[2] then below = '(' .. m[2] end
      if m[1] ~= m[2] then redis.call('HSET', mark, 'checkpoint', m[1], 'since', at) end
    end
  end
  if below and left > 0 then
    for _, job in ipairs(jobs(sent, below, 'LIMIT', 0, left)) do
      if at - job.sent < resend_ms then break end  -- and all after it are younger
      redis.call('ZREM', sent, job.id)
      post(job, 0, at)
      to_send(job)
      left = left - 1
    end
  end
end
return {send, expired, failed}
"""
)

# key of the reader's own stream, ttl_ms
WAKE = (
    PRELUDE
    + """
let_through()
redis.call('XADD', ARGV[2], 'MAXLEN', 1, '*', 'wake', '')
redis.call('PEXPIRE', ARGV[2], ARGV[3])
"""
)

"""The Lua in which every change of a job's state is made: atomic, and by one clock, Redis's own.

Knows keys, fields and transitions; JSON passes through unread. Knows nothing of connections or of Python's types.

Keys, all under the prefix that every script gets as ARGV[1] (they are put together here, so Redis Cluster is not
supported); times are milliseconds since the epoch:

    job:{id}               hash: the record (see `record.Job`), and our own `v level sequence sent claim by graced`
    preview:{id}           hash: the newest look at each of its pictures, and whose they are (`of`), for a minute
    events:{id}            stream of `type`, `data`, `of` (the job's incarnation), `v`; the terminal event is the last
    happened               stream: ids of the jobs that something was just written of, with spaces between
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
    and those of ledger.py, the counters of rates.py, and the lists of messages, as kombu keeps them (broker.py)

An id that is used again begins with nothing of its predecessor: a record's `incarnation`, the id of its first event, is
no other's; events carry it, it and the attempt fence a worker's writes, and who follows, cancels or erases names it.

On a full Redis (`noeviction`) a script's first write is refused if it could need memory; after a first write of
another kind all others go through. So what makes a job (creation.py) begins with one that is refused, and makes nothing
by halves; whatever ends a job, or keeps it going, begins with one that is not.
"""

from __future__ import annotations

from core.jobs.unreadable import VERSION

PRELUDE = (
    f"local P, V = ARGV[1], {VERSION}"
    + """

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
    'worker', 'deadline', 'claim', 'by', 'owner', 'webhook', 'inputs', 'digest', 'incarnation', 'v')
  if not v[1] then return nil end
  return {id = id, key = key, state = v[1], queue = v[2], level = v[3], sequence = v[4], sent = v[5], attempt = v[6],
    lost = v[7], work_ms = v[8], worker = v[9], deadline = v[10], claim = v[11], by = v[12],
    owner = v[13] or '', webhook = v[14], inputs = v[15] or '', digest = v[16] or '', incarnation = v[17] or '',
    v = v[18]}
end

-- Whether a job is live and its record of a known form: a newer version may have other states.
local function legible(job)
  return (job.state == 'queued' or job.state == 'running') and (tonumber(job.v or 1) or math.huge) <= V
    and job.queue and tonumber(job.attempt) and tonumber(job.lost) and tonumber(job.work_ms)
    and (job.state == 'running' or job.level and tonumber(job.sequence) and tonumber(job.sent))
    and (not job.deadline or tonumber(job.deadline)) and true
end

-- The job, if it is the one of this incarnation; '' is any.
local function read_same(id, incarnation)
  local job = read(id)
  if job and incarnation ~= '' and job.incarnation ~= incarnation then return nil end
  return job
end

-- Whether a fencing token is that of the present attempt: its number, and behind an @ the incarnation, where given.
local function holds(job, fence)
  local attempt, incarnation = string.match(fence, '^([^@]*)@?(.*)$')
  return job.attempt == attempt and (incarnation == '' or incarnation == job.incarnation)
end

-- How long what has ended is kept. What a batch asked for stays until that has read it, even if no API runs for a day;
-- what a receiver is to be told of, for as long as that is tried.
local function kept_ms(job, retention_ms)
  if job.webhook then return math.max(retention_ms, 43200000) end
  if string.sub(job.digest, 1, 6) == 'batch_' then return math.max(retention_ms, 172800000) end
  return retention_ms
end

local function count(job, state, n)
  local key = P .. 'backlog:' .. job.queue
  redis.call('HINCRBY', key, state, n)
  redis.call('HINCRBY', key, state .. '_ms', n * job.work_ms + 0)  -- + 0: Redis takes no -0
end

-- One notice for all who follow anything: they read the streams that it names, and no others.
local function notify(ids)
  redis.call('XADD', P .. 'happened', 'MAXLEN', '~', 1000, '*', 'jobs', ids)
end

local function emit(job, type, data, at)
  redis.call('XADD', P .. 'events:' .. job.id, at or '*', 'type', type, 'data', data, 'of', job.incarnation, 'v', V)
  notify(job.id)
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
  return sequence
end

local function requeue(job, by, at, reason)
  leave(job)
  redis.call('HSET', job.key, 'state', 'queued', 'worker', '', 'by', by)
  redis.call('HDEL', job.key, 'started', 'progress', 'claim')
  count(job, 'queued', 1)
  post(job, 0, at)
  emit(job, 'queued', '{"reason":"' .. reason .. '"}')
end

-- The one end of every job.
local function finish(job, state, by, at, retention_ms, field, value)
  retention_ms = kept_ms(job, retention_ms)
  leave(job)
  redis.call('ZREM', P .. 'deadlines', job.id)
  redis.call('DEL', P .. 'preview:' .. job.id)
  redis.call('HSET', job.key, 'state', state, 'ended', at, 'by', by)
  if field then redis.call('HSET', job.key, field, value) end
  emit(job, state, field == 'error' and value or '{}')
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

local function tell_to_cancel(job)
  local key = P .. 'control:' .. job.worker
  redis.call('XADD', key, 'MAXLEN', '~', 1000, '*', 'cancel', job.id, 'attempt', job.attempt, 'of', job.incarnation)
  redis.call('PEXPIRE', key, 3600000)  -- of a worker that died
end
"""
)

# id, worker, token of this call, lease_ms, retention_ms
# → attempt, modality, model, parameters, priority, ms to the deadline or '', suspect, trace, request id, incarnation,
#   followed ('1', '0', or '': nobody has said); or nothing.
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
  emit(job, 'running', '{"attempt":' .. attempt .. '}')
elseif job.state ~= 'running' or job.claim ~= token then  -- else the call was repeated: its answer got lost
  return false
end
local v = redis.call('HMGET', job.key, 'attempt', 'modality', 'model', 'parameters', 'priority', 'suspect', 'trace',
  'request_id', 'followed')
return {v[1], v[2], v[3], v[4], v[5], job.deadline and job.deadline - at or '', v[6] or '0', v[7] or '', v[8] or '',
  job.incarnation, v[9] or ''}
"""
)

# worker, lease_ms, then id, fence, … → the ids that are not this worker's.
RENEW = (
    PRELUDE
    + """
let_through()
local stale, until_ms = {}, now() + ARGV[3]
for i = 4, #ARGV, 2 do
  local job = read(ARGV[i])
  if job and job.state == 'running' and job.worker == ARGV[2] and holds(job, ARGV[i + 1]) then
    redis.call('ZADD', P .. 'leases', until_ms, job.id)
    redis.call('HDEL', job.key, 'graced')
  else
    stale[#stale + 1] = ARGV[i]
  end
end
return stale
"""
)

# id, fence, state, retention_ms, and for some: field, value, keys of artifacts with spaces between
# → 1, or 0: refused. Repeating it is harmless.
FINISH = (
    PRELUDE
    + """
local job, state = read(ARGV[2]), ARGV[4]
if not job or not holds(job, ARGV[3]) then return 0 end
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

# id, fence → the queue, or nothing: refused. Repeating it is harmless.
HAND_BACK = (
    PRELUDE
    + """
local job = read(ARGV[2])
if not job or not holds(job, ARGV[3]) then return false end
if job.state == 'running' then
  requeue(job, 'worker', now(), 'handed_back')
elseif job.state ~= 'queued' or job.by ~= 'worker' then
  return false
end
return job.queue
"""
)

# id, retention_ms, incarnation or '' → the record's fields afterwards; none if it is unknown.
CANCEL = (
    PRELUDE
    + """
local job = read_same(ARGV[2], ARGV[4])
if not job then return {} end
if job.state == 'queued' or job.state == 'running' then
  finish(job, 'cancelled', 'cancel', now(), ARGV[3])
  if job.state == 'running' then tell_to_cancel(job) end
end
return redis.call('HGETALL', job.key)
"""
)

# limit, lease_ms, max_attempts, retention_ms, resend_ms, overtime_ms, silence_ms, crashes until a job runs alone,
# then queue, level, kombu's list, …  → {id, queue, level, …} to send, {id, …} expired, {id, …} failed, how many entries
# of `ended` were looked at, {id, …} whose records cannot be read
SWEEP = (
    PRELUDE
    + """
let_through()
local limit, lease_ms, max_attempts, retention_ms = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local resend_ms, overtime_ms, silence_ms = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local alone_from = tonumber(ARGV[9])
local at, leases = now(), P .. 'leases'
local send, expired, failed, unreadable = {}, {}, {}, {}

local function to_send(job, level)
  for _, value in ipairs({job.id, job.queue, level}) do send[#send + 1] = value end
end

-- The jobs that a zset names. What has no record (somebody deleted it by hand) is dropped from it, and what cannot be
-- read, because a newer version wrote it or it is damaged, is left to others for a minute.
local function jobs(zset, ...)
  local found = {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', zset, '-inf', ...)) do
    local job = read(id)
    if not job then
      redis.call('ZREM', zset, id)
    elseif legible(job) then
      found[#found + 1] = job
    else
      unreadable[#unreadable + 1] = id
      if zset == leases or zset == P .. 'deadlines' then redis.call('ZADD', zset, at + 60000, id) end
    end
  end
  return found
end

local last = redis.call('GET', P .. 'swept')
redis.call('SET', P .. 'swept', at)
-- The clock was set back: no lease reaches further than from now.
if last and at < last - 1000 then
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases, '(' .. at + lease_ms, '+inf')) do
    redis.call('ZADD', leases, at + lease_ms, id)
  end
end
-- Nobody swept for long: most likely Redis was away, and nobody could renew. Each lease runs once more.
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
    if job.state == 'running' then tell_to_cancel(job) end
    expired[#expired + 1] = job.id
  end
end

-- Leases that ran out.
for _, job in ipairs(jobs(leases, at, 'LIMIT', 0, limit)) do
  local lost = job.lost + 1
  redis.call('HSET', job.key, 'lost', lost)
  if lost >= alone_from then redis.call('HSET', job.key, 'suspect', 1) end
  if lost >= max_attempts then
    local who = lost == 1 and 'a worker stopped answering while it ran' or
      lost .. ' workers stopped answering while they ran'
    finish(job, 'failed', 'sweep', at, retention_ms, 'error', '{"code":"crashed","message":"' .. who .. ' this job"}')
    failed[#failed + 1] = job.id
  else
    requeue(job, 'sweep', at, 'worker_lost')
    to_send(job, 0)
  end
end

-- Records whose time is up are gone by themselves; what lists them is told here.
local over = redis.call('ZRANGEBYSCORE', P .. 'ended', '-inf', at, 'LIMIT', 0, 5 * limit)
for _, entry in ipairs(over) do
  local owner, id = string.match(entry, '^([^|]*)|(.*)$')
  local key = P .. 'job:' .. id
  local left_ms = -2  -- it is gone, or the id is another's by now
  if redis.call('HGET', key, 'owner') == owner then left_ms = redis.call('PTTL', key) end
  if left_ms >= 0 then  -- the clock was set, or it is a millisecond
    redis.call('ZADD', P .. 'ended', at + math.max(left_ms, 1), entry)
  else
    redis.call('ZREM', P .. 'ended', entry)
  end
  if left_ms == -2 then
    redis.call('ZREM', P .. 'jobs', entry)
    redis.call('ZREM', P .. 'jobs:' .. owner, entry)
  end
end

-- Messages that got lost: Celery's list is empty, or one that was sent later has been claimed for a while.
local left = limit
for i = 10, #ARGV, 3 do
  local queue, level = ARGV[i], ARGV[i + 1]
  local sent, mark = P .. 'sent:' .. queue .. ':' .. level, P .. 'mark:' .. queue .. ':' .. level
  local below = redis.call('EXISTS', ARGV[i + 2]) == 0 and '+inf' or nil
  if not below then
    local m = redis.call('HMGET', mark, 'highest', 'checkpoint', 'since')
    if m[1] and (not m[3] or at - m[3] >= resend_ms or at < m[3] - 1000) then
      if m[2] then below = '(' .. m[2] end
      if m[1] ~= m[2] then redis.call('HSET', mark, 'checkpoint', m[1], 'since', at) end
    end
  end
  if below and left > 0 then
    for _, job in ipairs(jobs(sent, below, 'LIMIT', 0, left)) do
      local sent_ms = at - job.sent
      if sent_ms >= -1000 and sent_ms < resend_ms then break end  -- and all after it are younger
      redis.call('ZREM', sent, job.id)
      post(job, level, at)
      to_send(job, level)
      left = left - 1
    end
  end
end
return {send, expired, failed, #over, unreadable}
"""
)

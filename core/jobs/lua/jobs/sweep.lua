-- Finds passed deadlines, expired leases, expired records and lost messages, and sends messages that were held back.
-- include: shared/transitions
-- KEYS: none
-- ARGV: 2 limit, 3 lease_ms, 4 max_attempts, 5 retention_ms, 6 resend_ms, 7 overtime_ms, 8 silence_ms, 9 crashes after
--   which a job runs alone, 10… queues
-- Answer: {{id, queue, model, level, …} to send, {id, …} expired, {id, …} failed, how many entries of `ended` were examined,
--   {id, …} whose records are unreadable}

let_through()
local limit, lease_ms, max_attempts, retention_ms = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local resend_ms, overtime_ms, silence_ms = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local alone_from = tonumber(ARGV[9])
local at, leases = now(), P .. 'leases'
local send, expired, failed, unreadable = {}, {}, {}, {}

local function to_send(job, level)
  for _, value in ipairs({job.id, job.queue, job.model, level}) do send[#send + 1] = value end
end

local final = {succeeded = true, failed = true, cancelled = true, expired = true}

-- Returns the jobs of a zset. Entries without a record (deleted by hand) are dropped; unreadable records (damaged, or
-- written by a newer version) are postponed by a minute, for processes that can read them.
local function jobs(zset, ...)
  local found = {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', zset, '-inf', ...)) do
    local job = read(id)
    if not job or final[job.state] then  -- or a process of an older version, which knows other indexes, has ended it
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
-- The clock was set back: no lease may end later than one lease from now.
if last and at < last - 1000 then
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases, '(' .. at + lease_ms, '+inf')) do
    redis.call('ZADD', leases, at + lease_ms, id)
  end
end
-- No sweep ran for a while: most likely Redis was down and workers could not renew. Every lease is extended once.
if last and at - last > silence_ms then
  for _, job in ipairs(jobs(leases, at + lease_ms)) do
    if redis.call('HSETNX', job.key, 'graced', 1) == 1 then
      redis.call('ZADD', leases, at + lease_ms, job.id)
    end
  end
end

-- Passed deadlines. The worker gets a moment to report the expiry itself.
for _, job in ipairs(jobs(P .. 'deadlines', at, 'LIMIT', 0, limit)) do
  if job.state == 'queued' or job.deadline + overtime_ms <= at then
    expire(job, 'sweep', at, retention_ms)
    if job.state == 'running' then tell_to_cancel(job) end
    expired[#expired + 1] = job.id
  end
end

-- Expired leases.
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

-- Redis expires records by itself; their index entries are removed here.
local over = redis.call('ZRANGEBYSCORE', P .. 'ended', '-inf', at, 'LIMIT', 0, 5 * limit)
for _, entry in ipairs(over) do
  local owner, id = string.match(entry, '^([^|]*)|(.*)$')
  local key = P .. 'job:' .. id
  local left_ms = -2  -- the record is gone, or another owner's job has the id now
  if redis.call('HGET', key, 'owner') == owner then left_ms = redis.call('PTTL', key) end
  if left_ms >= 0 then  -- the clock was changed, or it expires within a millisecond
    redis.call('ZADD', P .. 'ended', at + math.max(left_ms, 1), entry)
  else
    redis.call('ZREM', P .. 'ended', entry)
  end
  if left_ms == -2 then
    redis.call('ZREM', P .. 'jobs', entry)
    redis.call('ZREM', P .. 'jobs:' .. owner, entry)
    weigh(owner, id, 0)
  end
end

-- Lost messages: Celery's list is empty, or a message sent later was claimed a while ago. While a worker offers a job,
-- it has the job's message.
local left = limit
local function resend(kombu, level)
  local sent, mark = P .. 'sent:' .. kombu .. ':' .. level, P .. 'mark:' .. kombu .. ':' .. level
  local below = redis.call('EXISTS', list_key(kombu, level)) == 0 and '+inf' or nil
  if not below then
    local m = redis.call('HMGET', mark, 'highest', 'checkpoint', 'since')
    if m[1] and (not m[3] or at - m[3] >= resend_ms or at < m[3] - 1000) then
      if m[2] then below = '(' .. m[2] end
      if m[1] ~= m[2] then redis.call('HSET', mark, 'checkpoint', m[1], 'since', at) end
    end
  end
  if not below or left <= 0 then return end
  for _, job in ipairs(jobs(sent, below, 'LIMIT', 0, left)) do
    if job.state ~= 'queued' or job.kombu ~= kombu or tonumber(job.level) ~= level then
      -- A process of an older version has claimed it, or sent it to the queue of all models.
      redis.call('ZREM', sent, job.id)
      if job.state == 'queued' and not redis.call('ZSCORE', P .. 'sent:' .. job.kombu .. ':' .. job.level, job.id) then
        count(job, 'queued', -1)
        post(job, level, at)
        to_send(job, level)
        left = left - 1
      end
    else
      local sent_ms = at - job.sent
      if sent_ms >= -1000 and sent_ms < resend_ms then return end  -- all later entries are younger
      local offered_ms = (tonumber(job.offered) or at) - at
      if offered_ms <= 0 or offered_ms > lease_ms then
        leave(job)
        post(job, level, at)
        to_send(job, level)
        left = left - 1
      end
    end
  end
end

-- Ends what is kept of a model: messages of jobs that wait no more and, once none runs, its place among the models.
local function close(queue, model)
  local kombu, waiting = model_queue(queue, model), 0
  for _, level in ipairs(PRIORITY_STEPS) do
    waiting = waiting + redis.call('ZCARD', P .. 'sent:' .. kombu .. ':' .. level)
  end
  local backlog = P .. 'backlog:' .. kombu
  if waiting > 0 or redis.call('SCARD', P .. 'flows:' .. kombu) > 0 then return end
  for _, level in ipairs(PRIORITY_STEPS) do
    redis.call('DEL', list_key(kombu, level), P .. 'mark:' .. kombu .. ':' .. level)
  end
  local live = tonumber(redis.call('HGET', backlog, 'running') or 0) > 0 and redis.call('ZCARD', leases) > 0
  if live or redis.call('SCARD', P .. 'owners:' .. kombu) > 0 then  -- `share` is still to look after these
    redis.call('HSET', backlog, 'queued', 0, 'queued_ms', 0)
  else
    redis.call('DEL', backlog)
    redis.call('SREM', P .. 'active:' .. queue, model)
  end
end

-- Places that came or became free while nothing of their owners happened; and what a process of an older version, or a
-- hand, left in `out` and in the count of held messages.
local function share(queue, model)
  local of = {queue = queue, model = model}
  for _, owner in ipairs(redis.call('SRANDMEMBER', key_of_model('owners', of), few)) do
    of.owner = owner
    repair_out(of, at)
  end
  for _, owner in ipairs(redis.call('SRANDMEMBER', key_of_model('flows', of), few)) do
    of.owner = owner
    feed(of, at)
  end
  if redis.call('SCARD', key_of_model('flows', of)) == 0 then redis.call('HDEL', key_of_model('backlog', of), 'held') end
end

for i = 10, #ARGV do
  local queue = ARGV[i]
  for _, model in ipairs(models(queue)) do
    for _, level in ipairs(PRIORITY_STEPS) do resend(model_queue(queue, model), level) end
    share(queue, model)
    if model ~= '' then close(queue, model) end
  end
end
return {send, expired, failed, #over, unreadable}

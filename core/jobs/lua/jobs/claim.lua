-- Claims a queued job for a worker. A repeated call returns the same answer.
-- include: shared/transitions
-- KEYS: none
-- ARGV: 2 id, 3 worker, 4 token of this call, 5 lease_ms, 6 retention_ms
-- Answer: {attempt, modality, model, parameters, priority, ms to the deadline or '', suspect, trace, request id,
--   incarnation, followed ('1', '0', or '': unspecified), owner, its key's checker or '', whether a large result may be an
--   artifact ('1', or '': an API of an older version reads it)}; or nothing

local job, token, at = read(ARGV[2]), ARGV[4], now()
if not job then return false end
if job.state == 'queued' then
  if job.deadline and tonumber(job.deadline) <= at then
    expire(job, 'claim', at, ARGV[6])
    return false
  end
  leave(job)
  local mark = P .. 'mark:' .. job.kombu .. ':' .. job.level
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
  set_out(job, 0)
  if job.owner ~= '' then feed(job, at) end
  emit(job, 'running', '{"attempt":' .. attempt .. '}')
  if attempt == 1 and calls(job.webhook, 'started') then redis.call('ZADD', P .. 'webhooks', at, job.id) end
elseif job.state ~= 'running' or job.claim ~= token then  -- otherwise this is a retry of a call whose reply was lost
  return false
end
local v = redis.call('HMGET', job.key, 'attempt', 'modality', 'model', 'parameters', 'priority', 'suspect', 'trace',
  'request_id', 'followed', 'lays')
-- Not from the job's record, which an API of an older version may have written.
local checker = job.owner ~= '' and redis.call('HGET', P .. 'checkers', job.owner)
return {v[1], v[2], v[3], v[4], v[5], job.deadline and job.deadline - at or '', v[6] or '0', v[7] or '', v[8] or '',
  job.incarnation, v[9] or '', job.owner, checker or '', v[10] or ''}

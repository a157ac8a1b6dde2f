-- Moves jobs between states, by the arrows of record.ARROWS: to the queue again, and to an end.
-- include: shared/footprint shared/moments shared/retention shared/events shared/queue

local function requeue(job, by, at, reason)
  leave(job)
  redis.call('HSET', job.key, 'state', 'queued', 'worker', '', 'by', by)
  redis.call('HDEL', job.key, 'started', 'progress', 'claim', 'offered')
  post(job, 0, at)
  emit(job, 'queued', '{"reason":"' .. reason .. '"}')
end

-- Ends a job; every terminal transition goes through here.
local function finish(job, state, by, at, retention_ms, field, value)
  retention_ms = kept_ms(job, retention_ms)
  local room = leave(job)
  redis.call('ZREM', P .. 'deadlines', job.id)
  redis.call('DEL', P .. 'preview:' .. job.id)
  redis.call('HSET', job.key, 'state', state, 'ended', at, 'by', by)
  if field then redis.call('HSET', job.key, field, value) end
  -- The results of a batch's lines are made of their requests too (batches/note.lua).
  if job.queue == 'text' and job.digest == '' then drop_request(job.key) end
  weigh(job.owner, job.id, excess_bytes(job.key))
  emit(job, state, field == 'error' and value or '{}')
  redis.call('PEXPIRE', job.key, retention_ms)
  redis.call('ZADD', P .. 'ended', at + retention_ms, job.owner .. '|' .. job.id)
  if job.webhook and tells(job.webhook, state) then redis.call('ZADD', P .. 'webhooks', at, job.id) end
  for artifact in string.gmatch(job.inputs, '%S+') do  -- inputs are retained like outputs from now on
    if redis.call('HINCRBY', P .. 'needed', artifact, -1) <= 0 then redis.call('HDEL', P .. 'needed', artifact) end
    redis.call('ZADD', P .. 'kept', 'GT', at + retention_ms + 3600000, artifact)
  end
  -- Followers of an ended job read its record, so its events, half of its memory, expire sooner; a long text's at once.
  local bytes = tonumber(redis.call('HGET', job.key, 'event_bytes')) or 0
  redis.call('PEXPIRE', P .. 'events:' .. job.id, math.min(retention_ms, bytes > large_events and 60000 or 3600000))
  if room then feed(job, at) end
end

local function expire(job, by, at, retention_ms)
  finish(job, 'expired', by, at, retention_ms, 'error',
    '{"code":"expired","message":"the deadline passed before the job was done"}')
end

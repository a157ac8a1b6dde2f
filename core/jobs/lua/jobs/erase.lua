-- Deletes a job's record and events; a live job is cancelled first.
-- include: shared/transitions shared/holding
-- KEYS: none
-- ARGV: 2 id, 3 retention_ms, 4 keep_ms, 5 incarnation or ''
-- Answer: 1, or 0: the job does not exist

let_through()
local job, at = read_same(ARGV[2], ARGV[5]), now()
if not job then return 0 end
local keep_ms = ARGV[4] + kept_ms(job, ARGV[3]) - ARGV[3]
if job.state == 'queued' or job.state == 'running' then
  finish(job, 'cancelled', 'cancel', at, ARGV[3])
  if job.state == 'running' then tell_to_cancel(job) end
  redis.call('PEXPIRE', P .. 'events:' .. job.id, 60000)  -- so that followers read the end
else
  redis.call('DEL', P .. 'events:' .. job.id)
end
for artifact in string.gmatch((redis.call('HGET', job.key, 'artifacts') or '') .. ' ' .. job.inputs, '%S+') do
  if redis.call('HINCRBY', P .. 'naming', artifact, -1) <= 0 then
    redis.call('HDEL', P .. 'naming', artifact)
    local score = redis.call('ZSCORE', P .. 'kept', artifact)
    -- Another job may have just written the same artifact and be about to reference it.
    local until_ms = math.max(at, held_until(artifact, at), (score or 0) - keep_ms + named_ms)
    if score then redis.call('ZADD', P .. 'kept', until_ms, artifact) end
  end
end
redis.call('DEL', job.key)
weigh(job.owner, job.id, 0)
for _, list in ipairs({'ended', 'jobs', 'jobs:' .. job.owner}) do
  redis.call('ZREM', P .. list, job.owner .. '|' .. job.id)
end
return 1

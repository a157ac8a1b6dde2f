-- Computes the queue position of a job.
-- include: shared/transitions

-- Returns how many jobs are served before a queued one: exact for a message in the queue, and as if all owners whose
-- messages are held back took turns for one that is held back itself.
local function jobs_ahead(job, level)
  local sent = P .. 'sent:' .. job.queue .. ':'
  local rank = redis.call('ZRANK', sent .. level, job.id)
  local ahead = rank or redis.call('ZCARD', sent .. level)
  for _, step in ipairs(PRIORITY_STEPS) do
    if step < tonumber(level) then ahead = ahead + redis.call('ZCARD', sent .. step) end
  end
  local turn = not rank and redis.call('ZRANK', key_of('flow', job), job.id)
  if not turn then return ahead end
  local others = tonumber(redis.call('HGET', P .. 'backlog:' .. job.queue, 'queued')) - 1
  return math.min(others, ahead + turn * redis.call('SCARD', P .. 'flows:' .. job.queue))
end

-- Computes the queue position of a job.
-- include: shared/queue

-- Returns how many jobs are served before a queued one: those whose messages are before its, of all models, or, for one
-- that is held back itself, as if all owners whose messages are held back took turns.
local function jobs_ahead(job, level, sequence)
  local turn = redis.call('ZRANK', key_of('flow', job), job.id)
  if not turn then return ahead(job.queue, level, sequence) end
  local others = tonumber(redis.call('HGET', P .. 'backlog:' .. job.queue, 'queued')) - 1
  return math.min(others, ahead(job.queue, level, 'inf') + turn * redis.call('SCARD', key_of_model('flows', job)))
end

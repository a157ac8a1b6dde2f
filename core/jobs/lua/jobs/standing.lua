-- Returns a queued job's position and its queue's backlog.
-- include: shared/positions
-- KEYS: none
-- ARGV: 2 id
-- Answer: {jobs ahead of it, jobs queued, their ms, jobs running, their ms}; or nothing: the job is not queued

local job = read(ARGV[2])
if not job or job.state ~= 'queued' then return false end
local b = redis.call('HMGET', P .. 'backlog:' .. job.queue, 'queued', 'queued_ms', 'running', 'running_ms')
return {jobs_ahead(job, job.level, tonumber(job.sequence) or 0), b[1] or '0', b[2] or '0', b[3] or '0', b[4] or '0'}

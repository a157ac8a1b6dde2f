-- Cancels a live job and notifies the worker that runs it.
-- include: shared/transitions shared/summary
-- KEYS: none
-- ARGV: 2 id, 3 retention_ms, 4 incarnation or ''
-- Answer: the record's fields afterwards; empty if the job does not exist

local job = read_same(ARGV[2], ARGV[4])
if not job then return {} end
if job.state == 'queued' or job.state == 'running' then
  finish(job, 'cancelled', 'cancel', now(), ARGV[3])
  if job.state == 'running' then tell_to_cancel(job) end
end
return summary(job.key)

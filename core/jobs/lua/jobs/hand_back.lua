-- Queues a running job again, at its worker's wish. Repeating it is harmless.
-- include: shared/transitions
-- KEYS: none
-- ARGV: 2 id, 3 fence
-- Answer: the queue, or nothing: refused

local job = read(ARGV[2])
if not job or not holds(job, ARGV[3]) then return false end
if job.state == 'running' then
  requeue(job, 'worker', now(), 'handed_back')
elseif job.state ~= 'queued' or job.by ~= 'worker' then
  return false
end
return job.queue

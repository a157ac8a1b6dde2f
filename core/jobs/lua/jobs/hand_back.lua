-- Queues a running job again when its worker gives it up. Idempotent.
-- include: shared/transitions
-- KEYS: none
-- ARGV: 2 id, 3 fencing token
-- Answer: {the queue, the model}, or nothing: stale fencing token

local job = read(ARGV[2])
if not job or not holds(job, ARGV[3]) then return false end
if job.state == 'running' then
  requeue(job, 'worker', now(), 'handed_back')
elseif job.state ~= 'queued' or job.by ~= 'worker' then
  return false
end
return {job.queue, job.model}

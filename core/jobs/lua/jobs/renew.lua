-- Renews the leases of a worker's jobs.
-- include: shared/record
-- KEYS: none
-- ARGV: 2 worker, 3 lease_ms, 4… id, fencing token of each job
-- Answer: the ids that this worker no longer holds

let_through()
local stale, until_ms = {}, now() + ARGV[3]
for i = 4, #ARGV, 2 do
  local job = read(ARGV[i])
  if job and job.state == 'running' and job.worker == ARGV[2] and holds(job, ARGV[i + 1]) then
    redis.call('ZADD', P .. 'leases', until_ms, job.id)
    redis.call('HDEL', job.key, 'graced')
  else
    stale[#stale + 1] = ARGV[i]
  end
end
return stale

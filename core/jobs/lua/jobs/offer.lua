-- Offers a queued job to workers: pushes messages into their own lists, which vanish if not emptied in time.
-- include: shared/queue
-- KEYS: none
-- ARGV: 2 id, 3 for how many ms, 4… kombu's list, message
-- Answer: 1, or 0: the job is not queued

local job, at = read(ARGV[2]), now()
if not job or job.state ~= 'queued' then return 0 end
redis.call('HSET', job.key, 'offered', at + ARGV[3])  -- a full Redis refuses it, with nothing offered
for i = 4, #ARGV, 2 do
  redis.call('LPUSH', ARGV[i], ARGV[i + 1])
  redis.call('PEXPIRE', ARGV[i], ARGV[3])
end
if job.owner ~= '' and redis.call('ZSCORE', key_of('out', job), job.id) then
  set_out(job, 0)  -- a worker has its message
  feed(job, at)
end
return 1

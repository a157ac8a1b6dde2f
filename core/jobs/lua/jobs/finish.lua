-- Ends a running job. Idempotent.
-- include: shared/transitions
-- KEYS: none
-- ARGV: 2 id, 3 fencing token, 4 state, 5 retention_ms; optional 6 field, 7 value, 8 artifacts separated by spaces
-- Answer: 1, or 0: stale fencing token

local job, state = read(ARGV[2]), ARGV[4]
if not job or not holds(job, ARGV[3]) then return 0 end
if job.state == 'running' then
  if state == 'expired' then
    expire(job, 'worker', now(), ARGV[5])
  else
    local at = now()
    finish(job, state, 'worker', at, ARGV[5], ARGV[6], ARGV[7])
    if ARGV[8] and ARGV[8] ~= '' then
      redis.call('HSET', job.key, 'artifacts', ARGV[8])
      for artifact in string.gmatch(ARGV[8], '%S+') do
        redis.call('HINCRBY', P .. 'naming', artifact, 1)
        redis.call('ZADD', P .. 'kept', 'GT', at + kept_ms(job, ARGV[5]) + 3600000, artifact)
      end
      weigh(job.owner, job.id, excess_bytes(job.key))
    end
  end
  return 1
end
return job.state == state and job.by == 'worker' and 1 or 0

-- Has a live job's progress told from now on, whatever its maker said.
-- include: shared/transitions
-- KEYS: none
-- ARGV: 2 id, 3 incarnation or ''
-- Answer: 1, or 0: it does not live

let_through()
local job = read_same(ARGV[2], ARGV[3])
if not job or (job.state ~= 'queued' and job.state ~= 'running') then return 0 end
redis.call('HSET', job.key, 'followed', 1)
return 1

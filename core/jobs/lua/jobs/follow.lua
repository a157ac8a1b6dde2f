-- Publishes a live job's progress events from now on, even if the job was created without them.
-- include: shared/record
-- KEYS: none
-- ARGV: 2 id, 3 incarnation or ''
-- Answer: 1, or 0: the job is not live

let_through()
local job = read_same(ARGV[2], ARGV[3])
if not job or (job.state ~= 'queued' and job.state ~= 'running') then return 0 end
redis.call('HSET', job.key, 'followed', 1)
return 1

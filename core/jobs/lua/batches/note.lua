-- Records the result of a line that was in progress.
--
-- A text job's record is kept until its result is copied here; from then on normal retention applies, and a large request
-- is dropped. An image job's record stays, because it references the image.
-- include: shared/retention shared/footprint
-- KEYS: none
-- ARGV: 2 batch, 3 line, 4 result, 5 kind ('': it did not run), 6 retention_ms
-- Answer: whether the line was in progress

local id = ARGV[2]
local job = redis.call('HGET', P .. 'batch_jobs:' .. id, ARGV[3])
if not job then return 0 end
local v = redis.call('HMGET', P .. 'job:' .. job, 'modality', 'ended', 'owner', 'digest')
if v[1] == 'text' and v[2] and v[4] == id then
  redis.call('PEXPIREAT', P .. 'job:' .. job, v[2] + ARGV[6])
  redis.call('ZADD', P .. 'ended', 'XX', v[2] + ARGV[6], (v[3] or '') .. '|' .. job)
  drop_request(P .. 'job:' .. job)
  weigh(v[3] or '', job, excess_bytes(P .. 'job:' .. job))
end
redis.call('HDEL', P .. 'batch_jobs:' .. id, ARGV[3])
redis.call('HSET', P .. 'batch_done:' .. id, ARGV[3], ARGV[4])
weigh_batch(redis.call('HGET', P .. 'batch:' .. id, 'owner') or '', id, #ARGV[4])
if ARGV[5] ~= '' then redis.call('HINCRBY', P .. 'batch:' .. id, ARGV[5], 1) end
return 1

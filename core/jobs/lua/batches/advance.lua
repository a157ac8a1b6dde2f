-- Records that a batch's next line has a job, or already has a result.
-- include: shared/footprint
-- KEYS: none
-- ARGV: 2 batch, 3 expected next line, 4 job or '', 5 the line's result or '', 6 kind of result ('completed',
--   'failed'), 7 byte offset of the line after it
-- Answer: whether it was the next line and the batch still starts lines

local P, id = ARGV[1], ARGV[2]
local key = P .. 'batch:' .. id
local v = redis.call('HMGET', key, 'next', 'status', 'owner')
if v[1] ~= ARGV[3] or v[2] ~= 'in_progress' then return 0 end
redis.call('HINCRBY', key, 'next', 1)
redis.call('HSET', key, 'place', ARGV[7])
weigh_batch(v[3], id, #ARGV[5] - line_bytes)
if ARGV[4] ~= '' then
  redis.call('HSET', P .. 'batch_jobs:' .. id, ARGV[3], ARGV[4])
else
  redis.call('HSET', P .. 'batch_done:' .. id, ARGV[3], ARGV[5])
  redis.call('HINCRBY', key, ARGV[6], 1)
end
return 1

-- Deletes a batch's record and what it keeps, whether or not it has ended. Its jobs stay.
-- include: shared/footprint shared/holding
-- KEYS: none
-- ARGV: 2 id
-- Answer: whether the record existed

local id, key = ARGV[2], P .. 'batch:' .. ARGV[2]
local v = redis.call('HMGET', key, 'owner', 'key')
redis.call('DEL', key, P .. 'batch_jobs:' .. id, P .. 'batch_done:' .. id)
redis.call('ZREM', P .. 'batches', id)
redis.call('ZREM', P .. 'every_batch', id)
if not v[1] then return 0 end
redis.call('ZREM', P .. 'batches:' .. v[1], id)
weigh(v[1], 'batch:' .. id, 0)
if v[2] then release(v[2], id, now()) end
return 1

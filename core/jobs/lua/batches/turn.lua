-- Changes a batch's status; a batch that ends leaves the list of active batches.
-- include: shared/footprint shared/holding
-- KEYS: none
-- ARGV: 2 batch, 3 expected status, 4… field, value
-- Answer: whether the batch had the expected status

local key = P .. 'batch:' .. ARGV[2]
if redis.call('HGET', key, 'status') ~= ARGV[3] then return 0 end
redis.call('HSET', key, unpack(ARGV, 4))
local status = redis.call('HGET', key, 'status')
if status ~= 'in_progress' and status ~= 'cancelling' then
  redis.call('ZREM', P .. 'batches', ARGV[2])
  redis.call('DEL', P .. 'batch_jobs:' .. ARGV[2], P .. 'batch_done:' .. ARGV[2])
  weigh(redis.call('HGET', key, 'owner') or '', 'batch:' .. ARGV[2], batch_excess_bytes(key))
  release(redis.call('HGET', key, 'key'), ARGV[2], now())
end
return 1

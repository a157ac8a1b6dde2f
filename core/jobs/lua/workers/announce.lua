-- Writes a worker's card and those of its models, and counts its places.
-- include: shared/places
-- KEYS: none
-- ARGV: 2 worker, 3 card, 4 ttl_ms, 5 keep_ms, 6 of how many models it takes jobs, then kombu queue, jobs at once of each,
--   then model, card of each
-- Answer: the queues that are paused

local at = now()
redis.call('ZREMRANGEBYSCORE', P .. 'workers', '-inf', at - ARGV[5])  -- a full Redis then accepts the rest
redis.call('ZADD', P .. 'workers', at, ARGV[2])
redis.call('SET', P .. 'worker:' .. ARGV[2], ARGV[3], 'PX', ARGV[4])
local models = 7 + 2 * ARGV[6]
for i = models, #ARGV, 2 do
  redis.call('HSET', P .. 'models', ARGV[i], ARGV[i + 1])
end

for _, gone in ipairs(redis.call('ZRANGEBYSCORE', P .. 'placed', '-inf', at, 'LIMIT', 0, 100)) do forget_places(gone) end
forget_places(ARGV[2])
if models > 7 then
  redis.call('ZADD', P .. 'placed', at + ARGV[4], ARGV[2])
  for i = 7, models - 1, 2 do
    redis.call('HSET', P .. 'places:' .. ARGV[2], ARGV[i], ARGV[i + 1])
    redis.call('HINCRBY', P .. 'places', ARGV[i], ARGV[i + 1])
  end
end
return redis.call('SMEMBERS', P .. 'paused')

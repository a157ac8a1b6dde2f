-- Writes a worker's card and those of its models.
-- include: shared/transitions
-- KEYS: none
-- ARGV: 2 worker, 3 card, 4 ttl_ms, 5 keep_ms, 6… model, card
-- Answer: the queues that are paused

local at = now()
redis.call('ZREMRANGEBYSCORE', P .. 'workers', '-inf', at - ARGV[5])  -- a full Redis then accepts the rest
redis.call('ZADD', P .. 'workers', at, ARGV[2])
redis.call('SET', P .. 'worker:' .. ARGV[2], ARGV[3], 'PX', ARGV[4])
for i = 6, #ARGV, 2 do
  redis.call('HSET', P .. 'models', ARGV[i], ARGV[i + 1])
end
return redis.call('SMEMBERS', P .. 'paused')

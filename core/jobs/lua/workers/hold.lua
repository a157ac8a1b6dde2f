-- Records which files a worker has in memory, for jobs that name them.
-- include: shared/record
-- KEYS: none
-- ARGV: 2 worker, 3 ttl_ms, 4 how many files it has, 5… these, and then those that it has no more
-- Answer: nothing

let_through()
local at = now()
for i = 5, #ARGV do
  local key = P .. 'holders:' .. ARGV[i]
  redis.call('ZREMRANGEBYSCORE', key, '-inf', at)
  if i < 5 + ARGV[4] then
    redis.call('ZADD', key, at + ARGV[3], ARGV[2])
    redis.call('PEXPIRE', key, ARGV[3])
  else
    redis.call('ZREM', key, ARGV[2])
  end
end

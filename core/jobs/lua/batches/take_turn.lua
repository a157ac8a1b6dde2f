-- Acquires or renews the lease of the single process that advances batches.
-- KEYS: none
-- ARGV: 2 token, 3 ttl_ms
-- Answer: whether this process holds it

local key = ARGV[1] .. 'batch_turn'
local who = redis.call('GET', key)
if who and who ~= ARGV[2] then return 0 end
redis.call('SET', key, ARGV[2], 'PX', ARGV[3])
return 1

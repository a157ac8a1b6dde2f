-- Deletes a file's record and releases its artifact.
-- include: shared/sizes
-- KEYS: none
-- ARGV: 2 id
-- Answer: whether the record existed

local key = P .. 'file:' .. ARGV[2]
local v = redis.call('HMGET', key, 'owner', 'key')
if not v[1] then return 0 end
redis.call('DEL', key)
redis.call('ZREM', P .. 'files:' .. v[1], ARGV[2])
discount(v[1], ARGV[2])
local sizes = P .. 'file_sizes:' .. v[1]
if redis.call('HGET', sizes, 'total') == '0' then redis.call('DEL', sizes) end
release(v[2], ARGV[2], now())
return 1

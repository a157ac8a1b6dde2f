-- Deletes an API key. Keys of older versions have no note, so it is made before the last of them goes.
-- include: shared/transitions
-- KEYS: none
-- ARGV: 2 id, 3 whether no job is made for it from now on (1 or 0)
-- Answer: whether there was one

let_through()
if redis.call('HEXISTS', P .. 'keys', ARGV[2]) == 0 then return 0 end
redis.call('SET', P .. 'access', 'keys')
if ARGV[3] == '1' then redis.call('SET', P .. 'barred:' .. ARGV[2], '', 'PX', 86400000) end
return redis.call('HDEL', P .. 'keys', ARGV[2])

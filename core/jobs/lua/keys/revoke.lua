-- Deletes an API key. Keys of older versions have no marker, so it is written before the last of them is deleted.
-- include: shared/record
-- KEYS: none
-- ARGV: 2 id, 3 whether to refuse new jobs of this owner from now on (1 or 0)
-- Answer: whether the key existed

let_through()
if ARGV[3] == '1' then redis.call('SET', P .. 'barred:' .. ARGV[2], '', 'PX', 86400000) end  -- also if revoked before
if redis.call('HEXISTS', P .. 'keys', ARGV[2]) == 0 then return 0 end
redis.call('SET', P .. 'access', 'keys')
return redis.call('HDEL', P .. 'keys', ARGV[2])

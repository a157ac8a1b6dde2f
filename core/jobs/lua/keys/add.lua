-- Adds an API key. The write that a full Redis refuses comes first, so that key and marker are written together or not
-- at all.
-- KEYS: none
-- ARGV: 2 id, 3 record
-- Answer: 1

redis.call('HSET', ARGV[1] .. 'keys', ARGV[2], ARGV[3])
redis.call('SET', ARGV[1] .. 'access', 'keys')
return 1

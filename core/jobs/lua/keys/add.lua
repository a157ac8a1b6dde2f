-- Adds an API key. What a full Redis refuses comes first, so that there is no key without its note, and no half of
-- both.
-- KEYS: none
-- ARGV: 2 id, 3 record
-- Answer: 1

redis.call('HSET', ARGV[1] .. 'keys', ARGV[2], ARGV[3])
redis.call('SET', ARGV[1] .. 'access', 'keys')
return 1

-- Adds an API key. The write that a full Redis refuses comes first, so that key and marker are written together or not
-- at all.
-- KEYS: none
-- ARGV: 2 id, 3 record, 4 what is done to flagged pictures of its jobs, or ''
-- Answer: 1

redis.call('HSET', ARGV[1] .. 'keys', ARGV[2], ARGV[3])
if ARGV[4] ~= '' then redis.call('HSET', ARGV[1] .. 'checkers', ARGV[2], ARGV[4]) end
redis.call('SET', ARGV[1] .. 'access', 'keys')
return 1

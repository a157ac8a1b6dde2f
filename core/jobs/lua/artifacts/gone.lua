-- Notes that artifacts are deleted.
-- include: shared/transitions
-- KEYS: none
-- ARGV: 2… artifacts
-- Answer: nothing

redis.call('ZREM', P .. 'going', unpack(ARGV, 2))

-- Records that artifacts were deleted.
-- include: shared/record
-- KEYS: none
-- ARGV: 2… artifacts
-- Answer: nothing

redis.call('ZREM', P .. 'going', unpack(ARGV, 2))

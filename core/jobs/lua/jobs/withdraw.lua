-- Prevents a pending call from creating a job with this id. An existing job is erased by erase.lua.
-- include: shared/record
-- KEYS: none
-- ARGV: 2 id
-- Answer: nothing

let_through()
redis.call('SET', P .. 'withdrawn:' .. ARGV[2], '', 'PX', 3600000)

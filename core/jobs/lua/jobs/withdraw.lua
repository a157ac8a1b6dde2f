-- Forbids that a job of this id is made, by a call that is still under way. One that exists is left to erase.lua.
-- include: shared/transitions
-- KEYS: none
-- ARGV: 2 id
-- Answer: nothing

let_through()
redis.call('SET', P .. 'withdrawn:' .. ARGV[2], '', 'PX', 3600000)

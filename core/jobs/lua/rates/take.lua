-- Counts charges against rate limits, all of them or none.
-- include: shared/charge
-- KEYS: none
-- ARGV: 2… the five values of each charge
-- Answer: the state of each limit, as charge.lua returns it, up to the first that is exceeded

local _, states = charge(ARGV, 2, 0)
return states

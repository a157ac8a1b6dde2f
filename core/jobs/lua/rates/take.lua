-- Counts one charge against a rate limit.
-- include: shared/charge
-- KEYS: none
-- ARGV: 2… the five values of the charge
-- Answer: the limit's state, as charge.lua returns it

local _, said = charge(ARGV, 2)
return said

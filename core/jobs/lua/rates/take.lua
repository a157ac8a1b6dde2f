-- Counts one charge.
-- include: shared/charge
-- KEYS: none
-- ARGV: 2… the five values of the charge
-- Answer: how it stands, as charge.lua says it

local _, said = charge(ARGV, 2)
return said

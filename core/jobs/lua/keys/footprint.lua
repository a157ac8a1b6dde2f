-- Returns the bytes that an owner's records take.
-- include: shared/footprint
-- KEYS: none
-- ARGV: 2 owner
-- Answer: bytes

return footprint(ARGV[2])

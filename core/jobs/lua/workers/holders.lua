-- Finds workers that have all of these files in memory, those first that announced them longest ago.
-- include: shared/record
-- KEYS: none
-- ARGV: 2… files
-- Answer: workers

local at, found = now(), nil
for i = 2, #ARGV do
  local also = {}
  for _, worker in ipairs(redis.call('ZRANGEBYSCORE', P .. 'holders:' .. ARGV[i], '(' .. at, '+inf')) do
    if not found or found[worker] then also[#also + 1], also[worker] = worker, true end
  end
  found = also
end
return found or {}

-- Lists batches in progress, oldest first.
-- KEYS: none
-- ARGV: 2 first rank, 3 count
-- Answer: {id, owner, endpoint, …}

local P, found = ARGV[1], {}
for _, id in ipairs(redis.call('ZRANGE', P .. 'batches', ARGV[2], ARGV[2] + ARGV[3] - 1)) do
  local v = redis.call('HMGET', P .. 'batch:' .. id, 'owner', 'endpoint')
  found[#found + 1] = id
  found[#found + 1] = v[1] or ''
  found[#found + 1] = v[2] or ''
end
return found

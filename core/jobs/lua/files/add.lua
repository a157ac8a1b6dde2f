-- Creates a file's record. An existing record of the same id stays unchanged.
-- include: shared/footprint shared/sizes
-- KEYS: none
-- ARGV: 2 id, 3 owner, 4 name, 5 purpose, 6 size, 7 key, 8 kept_ms, 9 quota in bytes or '', 10 and 11 width and height of a
-- picture or '', 12 whether the request came without a key ('1' or ''), 13 bytes that the owner's records may take or ''
-- Answer: {1, created}, {0, bytes that the owner already stores}, {-1, 0}: keys are required by now, or {-2, 0}: the owner's
-- records would take more bytes than they may

local id, owner, kept_ms = ARGV[2], ARGV[3], tonumber(ARGV[8])
local sizes, index = P .. 'file_sizes:' .. owner, P .. 'files:' .. owner
redis.call('HSETNX', sizes, 'total', 0)  -- first: a full Redis refuses it
local t = redis.call('TIME')
local at = now()
for _, old in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', (at - kept_ms) / 1000)) do discount(owner, old) end
redis.call('ZREMRANGEBYSCORE', index, '-inf', (at - kept_ms) / 1000)
local created = redis.call('HGET', P .. 'file:' .. id, 'created')
if created then return {1, created} end
if ARGV[12] == '1' and redis.call('GET', P .. 'access') == 'keys' then
  release(ARGV[7], id, at)
  return {-1, 0}
end
if beyond_share(owner, file_bytes, tonumber(ARGV[13]), at) then
  release(ARGV[7], id, at)
  return {-2, 0}
end
local total = redis.call('HGET', sizes, 'total')
if ARGV[9] ~= '' and total + ARGV[6] > tonumber(ARGV[9]) then
  release(ARGV[7], id, at)
  return {0, total}
end
redis.call('HSET', P .. 'file:' .. id, 'owner', owner, 'name', ARGV[4], 'purpose', ARGV[5], 'size', ARGV[6],
  'key', ARGV[7], 'created', t[1])
if ARGV[10] ~= '' then redis.call('HSET', P .. 'file:' .. id, 'width', ARGV[10], 'height', ARGV[11]) end
redis.call('PEXPIRE', P .. 'file:' .. id, kept_ms)
redis.call('ZADD', index, t[1] + t[2] / 1000000, id)  -- finer resolution than `created`: lists use this order
redis.call('HSET', sizes, id, ARGV[6])
redis.call('HINCRBY', sizes, 'total', ARGV[6])
redis.call('PEXPIRE', sizes, kept_ms + 86400000)
hold(ARGV[7], id, at + kept_ms, at)
return {1, t[1]}

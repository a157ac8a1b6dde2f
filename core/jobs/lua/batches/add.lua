-- Creates a batch's record. An input file written by a version without holds gets no hold here either.
-- include: shared/holding shared/footprint
-- KEYS: none
-- ARGV: 2 batch, 3 owner, 4 input file, 5 whether it is in progress (1 or 0), 6 kept_ms, 7 held_ms, 8 whether the request
-- came without a key ('1' or ''), 9 bytes that the owner's records may take or '', 10… field, value
-- Answer: creation time in s, 0: keys are required by now, or -1: the owner's records would take more bytes than they may

local id, owner, file = ARGV[2], ARGV[3], ARGV[4]
if ARGV[8] == '1' and redis.call('GET', P .. 'access') == 'keys' then return 0 end
local made_before = redis.call('HGET', P .. 'batch:' .. id, 'created')
if made_before then return made_before end  -- the reply was lost, and the call is repeated
redis.call('HSET', P .. 'batch:' .. id, unpack(ARGV, 10))  -- first: a full Redis refuses it
local t = redis.call('TIME')
local at, made, kept_ms = now(), t[1] + t[2] / 1000000, tonumber(ARGV[6])
local lines = ARGV[5] == '1' and tonumber(redis.call('HGET', P .. 'batch:' .. id, 'total')) or 0
local bytes = batch_excess_bytes(P .. 'batch:' .. id) + lines * line_bytes
for _, old in ipairs(redis.call('ZRANGEBYSCORE', P .. 'batches:' .. owner, '-inf', made - kept_ms / 1000)) do
  weigh(owner, 'batch:' .. old, 0)
end
if beyond_share(owner, batch_bytes + math.max(0, bytes), tonumber(ARGV[9]), at) then
  redis.call('DEL', P .. 'batch:' .. id)
  return -1
end
weigh(owner, 'batch:' .. id, bytes)
redis.call('HSET', P .. 'batch:' .. id, 'created', t[1])
redis.call('PEXPIRE', P .. 'batch:' .. id, kept_ms)
for _, index in ipairs({'batches:' .. owner, 'every_batch'}) do
  redis.call('ZADD', P .. index, made, id)
  redis.call('ZREMRANGEBYSCORE', P .. index, '-inf', made - kept_ms / 1000)
end
if ARGV[5] == '1' then
  redis.call('ZADD', P .. 'batches', t[1], id)
  local artifact = redis.call('HGET', P .. 'batch:' .. id, 'key')
  if redis.call('ZSCORE', P .. 'held:' .. artifact, file) then hold(artifact, id, at + ARGV[7], at) end
else
  redis.call('HSET', P .. 'batch:' .. id, 'ended', t[1])
end
return t[1]

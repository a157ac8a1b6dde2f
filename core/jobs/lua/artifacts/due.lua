-- Returns artifacts that no record, file or batch references any more; the caller deletes them.
-- include: shared/record
-- KEYS: none
-- ARGV: 2 limit
-- Answer: {artifact, …}

local going_ms = 60000  -- the process that was deleting the artifact is taken for dead after this time
local needed_ms = 600000  -- delay before an artifact that a live job reads is examined again
let_through()
local at = now()
local due = redis.call('ZRANGEBYSCORE', P .. 'going', '-inf', at - going_ms, 'LIMIT', 0, ARGV[2])
for _, artifact in ipairs(redis.call('ZRANGEBYSCORE', P .. 'kept', '-inf', at, 'LIMIT', 0, ARGV[2] - #due)) do
  if redis.call('HEXISTS', P .. 'needed', artifact) == 1 then
    redis.call('ZADD', P .. 'kept', at + needed_ms, artifact)
  else
    redis.call('ZREM', P .. 'kept', artifact)
    redis.call('HDEL', P .. 'naming', artifact)
    due[#due + 1] = artifact
  end
end
for _, artifact in ipairs(due) do redis.call('ZADD', P .. 'going', at, artifact) end
return due

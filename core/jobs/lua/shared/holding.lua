-- Files and batches hold artifacts: one is deleted once nothing holds it and no job names it.
--
--   held:{artifact}    zset: file or batch → until when; `made`: it is being made again at this moment
-- include: shared/transitions

local named_ms = 600000  -- between an artifact's making and the record that names it: so long nobody deletes it
local jobs_ms = 176400000  -- two days and an hour: the longest that a job that ended before now may name it

-- Until when anything holds an artifact; 0: nothing does.
local function held_until(artifact, at)
  local key = P .. 'held:' .. artifact
  redis.call('ZREMRANGEBYSCORE', key, '-inf', at)
  local last = redis.call('ZREVRANGE', key, 0, 0, 'WITHSCORES')
  return tonumber(last[2]) or 0
end

local function hold(artifact, who, until_ms, at)
  local key = P .. 'held:' .. artifact
  redis.call('ZADD', key, until_ms, who)
  redis.call('PEXPIRE', key, math.max(held_until(artifact, at), until_ms) - at + 1000)
  redis.call('ZADD', P .. 'kept', 'GT', until_ms, artifact)
end

-- Lets an artifact go as soon as nothing else needs it. One that this does not hold stays as it is.
local function release(artifact, who, at)
  if redis.call('ZREM', P .. 'held:' .. artifact, who) == 0 then return end
  local until_ms = math.max(at, held_until(artifact, at))
  if redis.call('HEXISTS', P .. 'naming', artifact) == 1 then until_ms = math.max(until_ms, at + jobs_ms) end
  local score = redis.call('ZSCORE', P .. 'kept', artifact)
  if score and tonumber(score) > until_ms then redis.call('ZADD', P .. 'kept', until_ms, artifact) end
end

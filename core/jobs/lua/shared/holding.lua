-- Places and releases holds of files and batches on artifacts.
--
-- An artifact is deleted once nothing holds it and no job references it.
--
--   held:{artifact}    zset: file or batch → end of the hold; `made`: the artifact is being written again now
-- include: shared/record

local named_ms = 600000  -- grace period between writing an artifact and the record that references it
local jobs_ms = 176400000  -- two days and an hour: longest retention of a job that has ended and references it

-- Returns the end of an artifact's last hold; 0: no hold.
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

-- Releases a hold on an artifact, which is deleted once nothing else needs it. Without this hold nothing changes.
local function release(artifact, who, at)
  if redis.call('ZREM', P .. 'held:' .. artifact, who) == 0 then return end
  local until_ms = math.max(at, held_until(artifact, at))
  if redis.call('HEXISTS', P .. 'naming', artifact) == 1 then until_ms = math.max(until_ms, at + jobs_ms) end
  local score = redis.call('ZSCORE', P .. 'kept', artifact)
  if score and tonumber(score) > until_ms then redis.call('ZADD', P .. 'kept', until_ms, artifact) end
end

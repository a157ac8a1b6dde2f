-- Counts the bytes that an owner's jobs, files and batches take in Redis. Each record counts as a small one does, by the
-- owner's indexes; what a record has beyond that is counted here.
--
--   heavy:{owner}          zset: job, or `batch:` and a batch → its bytes beyond those of a small record
--   heavy_bytes:{owner}    their sum
--
-- A process of an older version counts nothing, and gives nothing back when it ends what was counted: who is refused has
-- some entries checked.

local job_bytes = 8192  -- indexes, events and message included, with fields of `job_fields_bytes`
local job_fields_bytes = 2048
local batch_bytes, file_bytes, artifact_bytes = 2048, 1536, 320
local slack = 1.25  -- Redis allocates up to so many times the bytes of a value
local line_bytes = job_bytes + 1024  -- what is reserved for a line that waits in its file: a job, and a result

local function heavy_of(owner) return ARGV[1] .. 'heavy:' .. owner end

-- Sets the bytes that a job or a batch has beyond those of a small record.
local function weigh(owner, member, bytes)
  if owner == '' then return end
  local heavy, sum = heavy_of(owner), ARGV[1] .. 'heavy_bytes:' .. owner
  bytes = math.max(0, bytes)
  local change = bytes - (tonumber(redis.call('ZSCORE', heavy, member)) or 0)
  if change == 0 then return end
  redis.call(bytes > 0 and 'ZADD' or 'ZREM', heavy, unpack(bytes > 0 and {bytes, member} or {member}))
  redis.call('INCRBY', sum, change)
  if redis.call('EXISTS', heavy) == 0 then redis.call('DEL', sum) end
end

-- Changes the bytes of a batch, which were set when it was created.
local function weigh_batch(owner, id, change)
  local bytes = redis.call('ZSCORE', heavy_of(owner), 'batch:' .. id)
  if bytes then weigh(owner, 'batch:' .. id, bytes + change) end
end

-- Returns the bytes of a job's record beyond those of a small one.
local function excess_bytes(key)
  local v, bytes = redis.call('HMGET', key, 'artifacts', 'error', 'parameters', 'result', 'error', 'webhook', 'progress',
    'inputs', 'message', 'trace', 'request_id'), 0  -- the error twice: an event has it too
  for _, value in ipairs(v) do
    if value then bytes = bytes + #value end
  end
  local _, artifacts = string.gsub(v[1] or '', '%S+', '')
  return math.floor(slack * bytes) + artifacts * artifact_bytes - job_fields_bytes
end

-- Returns the bytes of a batch's record beyond those of a small one.
local function batch_excess_bytes(key)
  local bytes = 0
  for _, value in ipairs(redis.call('HGETALL', key)) do bytes = bytes + #value end
  return math.floor(slack * bytes) - batch_bytes / 2
end

local function footprint(owner)
  local function count(index) return redis.call('ZCARD', ARGV[1] .. index .. ':' .. owner) end
  return count('jobs') * job_bytes + count('files') * file_bytes + count('batches') * batch_bytes
    + (tonumber(redis.call('GET', ARGV[1] .. 'heavy_bytes:' .. owner)) or 0)
end

-- Counts a few entries again, others each time.
local function repair_heavy(owner, at)
  local heavy = heavy_of(owner)
  local first = at % math.max(1, redis.call('ZCARD', heavy) - 16)
  for _, member in ipairs(redis.call('ZRANGE', heavy, first, first + 16)) do
    local batch = string.match(member, '^batch:') ~= nil
    local key = ARGV[1] .. (batch and member or 'job:' .. member)
    local v = redis.call('HMGET', key, 'owner', 'status')
    if v[1] ~= owner then
      weigh(owner, member, 0)
    elseif not batch then
      weigh(owner, member, excess_bytes(key))
    elseif v[2] ~= 'in_progress' and v[2] ~= 'cancelling' then
      weigh(owner, member, batch_excess_bytes(key))
    end
  end
end

-- Whether an owner has no room for so many bytes more; `limit` in bytes, or nil: none.
local function beyond_share(owner, bytes, limit, at)
  if not limit or owner == '' or footprint(owner) + bytes <= limit then return false end
  repair_heavy(owner, at)
  return footprint(owner) + bytes > limit
end

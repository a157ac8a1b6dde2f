-- Keeps what has ended: for how long, and how much of it.
-- include: shared/record

-- Returns how long an ended job is kept: at least as long as it was created with, and at least until its webhook is
-- delivered or given up.
local function kept_ms(job, retention_ms)
  if job.webhook then return math.max(retention_ms, 43200000) end
  if job.keep_ms then return math.max(retention_ms, job.keep_ms) end
  -- Records of the previous version lack the field: there, a batch's lines carry its id.
  if job.digest ~= '' and redis.call('EXISTS', P .. 'batch:' .. job.digest) == 1 then
    return math.max(retention_ms, 172800000)
  end
  return retention_ms
end

local most_kept = 16384  -- bytes of a request
local large_events = 65536

-- Drops the request of a text job that has ended, if it is large: its text is the client's. Its size stays.
local function drop_request(key)
  local parameters = redis.call('HGET', key, 'parameters')
  if parameters and #parameters > most_kept then
    redis.call('HSET', key, 'parameters', '{}', 'dropped', #parameters)
  end
end

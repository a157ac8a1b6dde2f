-- Reads a job's record as far as lists show it: of a text neither its request nor its answer.

local P = ARGV[1]

local function is_text(key) return redis.call('HGET', key, 'modality') == 'text' end

-- How many bytes a summary may have, besides those of fields that are always small.
local function summary_bytes(key)
  local bytes = redis.call('HSTRLEN', key, 'progress') + redis.call('HSTRLEN', key, 'error')
  if is_text(key) then return bytes end
  return bytes + redis.call('HSTRLEN', key, 'parameters') + redis.call('HSTRLEN', key, 'result')
end

-- The record's fields: their names, each followed by its value.
local function summary(key)
  local text, names, fields = is_text(key), {}, {}
  for _, name in ipairs(FIELDS) do
    if not text or name ~= 'parameters' and name ~= 'result' then names[#names + 1] = name end
  end
  for i, value in ipairs(redis.call('HMGET', key, unpack(names))) do
    if value then fields[#fields + 1], fields[#fields + 2] = names[i], value end
  end
  if text then fields[#fields + 1], fields[#fields + 2] = 'parameters', '{}' end
  return fields
end

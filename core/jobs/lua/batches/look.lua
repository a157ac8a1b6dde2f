-- Reads batches and the states of their lines' jobs.
-- KEYS: none
-- ARGV: 2… batches
-- Answer: for each batch: {its fields}, {line, job, 'live', 'ended' or 'lost', …}

local P, found = ARGV[1], {}
for i = 2, #ARGV do
  found[#found + 1] = redis.call('HGETALL', P .. 'batch:' .. ARGV[i])
  local jobs = redis.call('HGETALL', P .. 'batch_jobs:' .. ARGV[i])
  local lines = {}
  for k = 1, #jobs, 2 do
    local v = redis.call('HMGET', P .. 'job:' .. jobs[k + 1], 'state', 'digest')
    lines[#lines + 1] = jobs[k]
    lines[#lines + 1] = jobs[k + 1]
    lines[#lines + 1] = v[2] ~= ARGV[i] and 'lost' or (v[1] == 'queued' or v[1] == 'running') and 'live' or 'ended'
  end
  found[#found + 1] = lines
end
return found

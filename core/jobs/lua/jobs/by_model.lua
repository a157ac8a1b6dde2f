-- Sums the live jobs of queues by model.
-- KEYS: none
-- ARGV: 2 maximum number of queued jobs of each queue, and of running jobs, to examine, 3… queues
-- Answer: {model, state, jobs, their ms, …}; a model may occur several times, and a job counts for a millisecond at least.
--   The most urgent and the oldest jobs are examined; the others count as divided among the models like these.

local P, looks = ARGV[1], tonumber(ARGV[2])
local answer = {}

local function sum(state, total, ids)
  local models, jobs, work_ms, examined = {}, {}, {}, 0
  for _, id in ipairs(ids) do
    local v = redis.call('HMGET', P .. 'job:' .. id, 'model', 'work_ms')
    local model = v[1]
    if model then
      if not jobs[model] then models[#models + 1], jobs[model], work_ms[model] = model, 0, 0 end
      jobs[model], work_ms[model] = jobs[model] + 1, work_ms[model] + math.max(1, tonumber(v[2]) or 0)
      examined = examined + 1
    end
  end
  local factor = #ids < total and total / math.max(1, examined) or 1
  for _, model in ipairs(models) do
    for _, value in ipairs({model, state, math.floor(jobs[model] * factor + 0.5),
      math.floor(work_ms[model] * factor + 0.5)}) do
      answer[#answer + 1] = value
    end
  end
end

for i = 3, #ARGV do
  local ids, total = {}, 0
  for _, step in ipairs(PRIORITY_STEPS) do
    local key = P .. 'sent:' .. ARGV[i] .. ':' .. step
    total = total + redis.call('ZCARD', key)
    if #ids < looks then
      for _, id in ipairs(redis.call('ZRANGE', key, 0, looks - #ids - 1)) do ids[#ids + 1] = id end
    end
  end
  sum('queued', total, ids)
end
sum('running', redis.call('ZCARD', P .. 'leases'), redis.call('ZRANGE', P .. 'leases', 0, looks - 1))
return answer

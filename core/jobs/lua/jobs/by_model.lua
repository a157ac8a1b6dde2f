-- Sums the live jobs of a queue by model.
-- KEYS: none
-- ARGV: 2 queue, 3 maximum number of jobs of a state to examine
-- Answer: {model, state, jobs, their ms, …}. The most urgent and the oldest jobs are examined; the others count as divided
--   among the models like these.

local P, queue, looks = ARGV[1], ARGV[2], tonumber(ARGV[3])
local answer = {}

local function sum(state, ids, left_out)
  local models, jobs, work_ms = {}, {}, {}
  for _, id in ipairs(ids) do
    local v = redis.call('HMGET', P .. 'job:' .. id, 'modality', 'model', 'work_ms')
    local model = v[1] == queue and v[2]
    if model then
      if not jobs[model] then models[#models + 1], jobs[model], work_ms[model] = model, 0, 0 end
      jobs[model], work_ms[model] = jobs[model] + 1, work_ms[model] + (tonumber(v[3]) or 0)
    end
  end
  for _, model in ipairs(models) do
    local factor = 1 + left_out / #ids
    for _, value in ipairs({model, state, math.floor(jobs[model] * factor + 0.5),
      math.floor(work_ms[model] * factor + 0.5)}) do
      answer[#answer + 1] = value
    end
  end
end

local ids, total = {}, 0
for _, step in ipairs(PRIORITY_STEPS) do
  local key = P .. 'sent:' .. queue .. ':' .. step
  total = total + redis.call('ZCARD', key)
  if #ids < looks then
    for _, id in ipairs(redis.call('ZRANGE', key, 0, looks - #ids - 1)) do ids[#ids + 1] = id end
  end
end
sum('queued', ids, total - #ids)
local running = redis.call('ZRANGE', P .. 'leases', 0, looks - 1)
sum('running', running, redis.call('ZCARD', P .. 'leases') - #running)
return answer

-- Announces how soon a worker could run jobs of its models; tells who would be first, and what waits.
--
--   delays:{kombu}   zset: worker that serves the model → ms after which it could run the next job of it
-- include: shared/record
-- KEYS: none
-- ARGV: 2 worker, 3 ttl_ms, 4… kombu queue, delay in ms or '' for a model that is served no more
-- Answer: of each queue with a delay: 1 if no other worker's is less, else 0, and for how many ms the job whose message
--   was sent first has waited, or -1: none waits

let_through()
local worker, at, answer = ARGV[2], now(), {}

-- Whether no live worker's delay is less; entries of workers whose cards are gone are removed.
local function least(delays)
  while true do
    local first = redis.call('ZRANGE', delays, 0, 0)[1]
    if not first or first == worker then return 1 end
    if redis.call('EXISTS', P .. 'worker:' .. first) == 1 then return 0 end
    redis.call('ZREM', delays, first)
  end
end

local function waited_ms(kombu)
  local longest_ms = -1
  for _, level in ipairs(PRIORITY_STEPS) do
    local id = redis.call('ZRANGE', P .. 'sent:' .. kombu .. ':' .. level, 0, 0)[1]
    local sent = id and tonumber(redis.call('HGET', P .. 'job:' .. id, 'sent'))
    if sent then longest_ms = math.max(longest_ms, at - sent, 0) end
  end
  return longest_ms
end

for i = 4, #ARGV, 2 do
  local kombu, delay_ms = ARGV[i], ARGV[i + 1]
  local delays = P .. 'delays:' .. kombu
  if delay_ms == '' then
    redis.call('ZREM', delays, worker)
  else
    redis.call('ZADD', delays, delay_ms, worker)
    redis.call('PEXPIRE', delays, ARGV[3])
    answer[#answer + 1] = least(delays)
    answer[#answer + 1] = waited_ms(kombu)
  end
end
return answer

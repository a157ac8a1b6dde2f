-- Cancels waiting jobs of a queue: of those whose messages are held back, and then of all, most urgent first.
-- include: shared/transitions
-- KEYS: none
-- ARGV: 2 queue, 3 retention_ms, 4 limit
-- Answer: how many were cancelled

let_through()
local at, cancelled = now(), 0
-- Those that are held back first, else each one that is cancelled would make room for another.
for _, model in ipairs(models(ARGV[2])) do
  local of = {queue = ARGV[2], model = model}
  for _, owner in ipairs(redis.call('SMEMBERS', key_of_model('flows', of))) do
    of.owner = owner
    local flow, passed, ids = key_of('flow', of), 0, nil
    repeat
      ids = redis.call('ZRANGE', flow, passed, passed + ARGV[4] - 1 - cancelled)
      for _, id in ipairs(ids) do
        local job = read(id)
        if job and job.state == 'queued' and not legible(job) then
          passed = passed + 1
        elseif job and job.state == 'queued' then
          finish(job, 'cancelled', 'cancel', at, ARGV[3])
          cancelled = cancelled + 1
        else
          redis.call('ZREM', flow, id)
          depart(of)
        end
      end
      if cancelled >= tonumber(ARGV[4]) then return cancelled end
    until #ids == 0
  end
end
for _, level in ipairs(PRIORITY_STEPS) do
  for _, model in ipairs(models(ARGV[2])) do
    local sent, ids = P .. 'sent:' .. model_queue(ARGV[2], model) .. ':' .. level, nil
    repeat
      ids = redis.call('ZRANGE', sent, 0, ARGV[4] - 1 - cancelled)
      for _, id in ipairs(ids) do
        local job = read(id)
        if job and legible(job) and job.state == 'queued' then
          finish(job, 'cancelled', 'cancel', at, ARGV[3])
          cancelled = cancelled + 1
        end
        redis.call('ZREM', sent, id)  -- also where the record was deleted by hand, is damaged, or has its entry elsewhere
      end
      if cancelled >= tonumber(ARGV[4]) then return cancelled end
    until #ids == 0
  end
end
return cancelled

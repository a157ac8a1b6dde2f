-- Shares the queue of a model among owners: holds back messages of an owner that would take the places of others, or
-- that are more than its limit of jobs at the model's workers.
--
-- Workers take messages first in, first out by level, so that one owner's many would stand before all others' next. Jobs
-- of callers without a key have no owner here, and are never held back. Models are shared apart: jobs of one that no
-- worker serves take no place of another's.
--
--   flow:{kombu}:{owner}   zset: an owner's queued jobs whose messages are held back, in the fields `list` and `message`
--                          of their records → level and sequence
--   out:{kombu}:{owner}    zset: an owner's other live jobs → 1 + level while the message waits for a worker, else 0
--   flows:{kombu}          set: owners with a flow
--   owners:{kombu}         set: owners with live jobs
--   places, places:{worker}  hash: kombu queue → jobs that all live workers of its model, or this one, take at once
--   placed                 zset: worker counted in `places` → until when without another heartbeat
--
-- An owner with a flow has jobs in `out`: their claims and ends send its next messages, and a sweep sends those of lost
-- messages again.

local P = ARGV[1]
local window = 4  -- messages of an owner and level that wait while no worker tells its places
local spare = 8  -- one of so many places is left to owners with few jobs
local at_once = 100
local few = 16  -- owners of a model, or entries of a set, that are looked after at a time

-- The kombu queue of a queue's messages for one model (broker.model_queue); without a model, that of older versions.
local function model_queue(queue, model)
  if not model or model == '' then return queue end
  return queue .. '.' .. string.gsub(string.gsub(model, '%%', '%%25'), SEPARATOR, '%%3A')
end

-- A key of a job's model, or of a job's owner there.
local function key_of_model(name, job) return P .. name .. ':' .. model_queue(job.queue, job.model) end
local function key_of(name, job) return key_of_model(name, job) .. ':' .. job.owner end

-- Records that a job of an owner has a message in the queue (`state`: 1 + level), or that a worker has it (0).
local function set_out(job, state)
  if job.owner == '' then return end
  redis.call('ZADD', key_of('out', job), state, job.id)
  redis.call('SADD', key_of_model('owners', job), job.owner)
end

local function depart(job)
  if redis.call('ZCARD', key_of('flow', job)) > 0 then return end
  redis.call('SREM', key_of_model('flows', job), job.owner)
  if redis.call('ZCARD', key_of('out', job)) == 0 then redis.call('SREM', key_of_model('owners', job), job.owner) end
end

-- How many live jobs of a model an owner has.
local function live_jobs(of) return redis.call('ZCARD', key_of('out', of)) + redis.call('ZCARD', key_of('flow', of)) end

-- Removes what a process of an older version, or a hand, left in an owner's `out`: of a few jobs, of others each time.
local function repair_out(of, at)
  local out = key_of('out', of)
  local first = at % math.max(1, redis.call('ZCARD', out) - few)
  for _, id in ipairs(redis.call('ZRANGE', out, first, first + few)) do
    local v = redis.call('HMGET', P .. 'job:' .. id, 'state', 'owner')
    if v[2] ~= of.owner or v[1] ~= 'queued' and v[1] ~= 'running' then redis.call('ZREM', out, id) end
    if v[2] == of.owner and v[1] == 'running' then redis.call('ZADD', out, 0, id) end
  end
  depart(of)
end

-- Removes a live job of an owner. Returns whether its message was held back, and whether it made room for another.
local function remove_share(job)
  if job.owner == '' then return false, false end
  local out = redis.call('ZREM', key_of('out', job), job.id)
  local held = redis.call('ZREM', key_of('flow', job), job.id)
  depart(job)
  return held == 1, out == 1
end

-- Whether an owner may have one more message of this level in the queue. As far as the workers' places are known, an
-- owner has no more jobs there and in workers than its share of the places, unless others leave places free. Some are
-- spared: a job of an owner with few jobs finds a place at once. The job's `most_running` limits them in any case: a
-- number, or a share of the places, at least one.
local function may_send(job, level)
  local live = redis.call('ZCARD', key_of('out', job))
  local places = tonumber(redis.call('HGET', P .. 'places', model_queue(job.queue, job.model))) or 0
  if job.most_running ~= '' then
    local share = string.match(job.most_running, '^(%d+)%%$')
    local most = share and math.max(1, math.floor(math.max(0, places) * share / 100)) or tonumber(job.most_running)
    if live >= most then return false end
  end
  if places <= 0 then
    return #redis.call('ZRANGEBYSCORE', key_of('out', job), level + 1, level + 1, 'LIMIT', 0, window) < window
  end
  places = places - math.floor(places / spare)
  local share = math.floor(places / math.max(1, redis.call('SCARD', key_of_model('owners', job))))
  if live < math.max(1, share) then return true end
  local b = redis.call('HMGET', key_of_model('backlog', job), 'queued', 'running', 'held')
  return (b[1] or 0) + (b[2] or 0) - (b[3] or 0) < places
end

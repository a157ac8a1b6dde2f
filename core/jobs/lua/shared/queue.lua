-- Puts jobs into the queues of their models and takes them out, or holds their messages back.
-- include: shared/record shared/fairness

-- The list in which kombu keeps messages of one level (broker.list_key).
local function list_key(kombu, level)
  return tonumber(level) == 0 and kombu or kombu .. SEPARATOR .. level
end

-- The models of which a queue's jobs wait or run, and '' for jobs that an older version has sent.
local function models(queue)
  local names = redis.call('SMEMBERS', P .. 'active:' .. queue)
  names[#names + 1] = ''
  return names
end

local function count(job, state, n)
  for _, queue in ipairs(job.kombu == job.queue and {job.queue} or {job.queue, job.kombu}) do
    redis.call('HINCRBY', P .. 'backlog:' .. queue, state, n)
    redis.call('HINCRBY', P .. 'backlog:' .. queue, state .. '_ms', n * job.work_ms + 0)  -- + 0: Redis rejects -0
  end
end

-- Removes a live job from the indexes of its state. Its first write frees memory. Returns whether it made room for
-- another of its owner's jobs.
local function leave(job)
  if job.state == 'queued' then
    redis.call('ZREM', P .. 'sent:' .. job.kombu .. ':' .. job.level, job.id)
    if job.owner ~= '' then redis.call('SREM', P .. 'waiting:' .. job.queue .. ':' .. job.owner, job.id) end
  else
    redis.call('ZREM', P .. 'leases', job.id)
  end
  count(job, job.state, -1)
  local held, room = remove_share(job)
  if held then
    redis.call('HINCRBY', key_of_model('backlog', job), 'held', -1)
    redis.call('HDEL', job.key, 'list', 'message')
  end
  return room
end

-- Records that a queued job's message is sent now, to the queue of its model.
local function post(job, level, at)
  local sequence = redis.call('INCR', P .. 'sequence')
  job.kombu = model_queue(job.queue, job.model)
  redis.call('HSET', job.key, 'level', level, 'sequence', sequence, 'sent', at, 'routed', 1)
  redis.call('ZADD', P .. 'sent:' .. job.kombu .. ':' .. level, sequence, job.id)
  if job.model ~= '' then redis.call('SADD', P .. 'active:' .. job.queue, job.model) end
  count(job, 'queued', 1)
  if job.owner ~= '' then redis.call('SADD', P .. 'waiting:' .. job.queue .. ':' .. job.owner, job.id) end
  set_out(job, level + 1)
  return sequence
end

-- How many queued jobs of its queue, of all models, are before a job of this level and sequence.
local function ahead(queue, level, sequence)
  local jobs = 0
  for _, model in ipairs(models(queue)) do
    local sent = P .. 'sent:' .. model_queue(queue, model) .. ':'
    for _, step in ipairs(PRIORITY_STEPS) do
      if step < tonumber(level) then jobs = jobs + redis.call('ZCARD', sent .. step) end
    end
    jobs = jobs + redis.call('ZCOUNT', sent .. level, '-inf', '(' .. sequence)
  end
  return jobs
end

-- Holds back the message of a new job, which is for kombu's `list`.
local function hold_back(job, level, at, list, message)
  local sequence = redis.call('INCR', P .. 'sequence')
  job.kombu = model_queue(job.queue, job.model)
  redis.call('HSET', job.key, 'level', level, 'sequence', sequence, 'sent', at, 'routed', 1, 'list', list,
    'message', message)
  redis.call('ZADD', key_of('flow', job), level * 2 ^ 44 + sequence, job.id)
  redis.call('SADD', P .. 'active:' .. job.queue, job.model)
  redis.call('SADD', key_of_model('flows', job), job.owner)
  redis.call('SADD', key_of_model('owners', job), job.owner)
  redis.call('SADD', P .. 'waiting:' .. job.queue .. ':' .. job.owner, job.id)
  count(job, 'queued', 1)
  redis.call('HINCRBY', key_of_model('backlog', job), 'held', 1)
  return sequence
end

-- Sends messages of an owner's jobs of a model that were held back, as many as it may have in the queue now, the most
-- urgent first. Records that this version cannot read are passed over.
local function feed(of, at)
  local flow, passed = key_of('flow', of), 0
  for _ = 1, at_once do
    local id = redis.call('ZRANGE', flow, passed, passed)[1]
    if not id then break end
    local job = read(id)
    local held = job and job.state == 'queued' and job.owner == of.owner and redis.call('HMGET', job.key, 'list', 'message')
    if held and not legible(job) then
      passed = passed + 1
    elseif held and held[2] then
      if not may_send(job, job.level) then return end
      redis.call('ZREM', flow, id)
      redis.call('HINCRBY', key_of_model('backlog', job), 'held', -1)
      count(job, 'queued', -1)  -- `post` counts it
      post(job, job.level, at)
      redis.pcall('LPUSH', held[1], held[2])  -- a sweep finds that a message is missing
      redis.call('HDEL', job.key, 'list', 'message')
    else  -- ended by a process of an older version
      redis.call('ZREM', flow, id)
    end
  end
  depart(of)
end

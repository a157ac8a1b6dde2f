-- Reads job records and moves jobs between states; included by every script that changes a job.
--
-- Every change of a job's state is made in a script: it is atomic, and all times come from one clock, Redis's own.
-- Scripts pass JSON through without parsing it.
--
-- Keys, all under the prefix that every script gets as ARGV[1] (scripts build key names, so Redis Cluster is not
-- supported); times are milliseconds since the epoch:
--
--   job:{id}               hash: the record (see record.Job) and internal fields `v level sequence sent routed list message
--                          offered claim by graced most_running dropped event_bytes lays`
--                          Where the owner chose the id of the job, that is `name`, and {id} is derived from both
--   preview:{id}           hash: the newest preview of each of its pictures, and their incarnation (`of`), for a minute
--   events:{id}            stream of `type`, `data`, `of` (the job's incarnation), `v`; the terminal event is the last
--   happened               stream: ids of jobs with new events, separated by spaces
--   leases                 zset: running job → end of its lease
--   deadlines              zset: live job with a deadline → its deadline
--   active:{queue}         set: models of which jobs wait or run, each with a kombu queue (`model_queue`) of its own
--   sent:{kombu}:{level}   zset: queued job → sequence, in the order in which their messages were sent to a kombu queue
--   mark:{kombu}:{level}   hash: `highest` sequence ever claimed; `checkpoint`, its value at `since`
--   backlog:{queue}        hash: queued, queued_ms, running, running_ms: always equal to the count over the records
--   backlog:{kombu}        the same of one model, and held: of the queued ones, those whose messages are held back; a
--                          process of an older version does not count here, which a sweep mends
--   waiting:{queue}:{owner}  set: an owner's queued jobs; a process of an older version may leave stale ones
--   flow:{kombu}:{owner}, out:{kombu}:{owner}, flows:{kombu}, owners:{kombu}, places, placed    see fairness.lua
--   sequence, swept        the last sequence assigned; the time of the last sweep
--   jobs, jobs:{owner}     zset: owner|job → creation time
--   ended                  zset: owner|job → expiry of its record
--   withdrawn:{id}         no job with this id may be created, for an hour
--   barred:{owner}         exists for a day after a key was revoked together with its jobs: the owner creates no job
--   kept                   zset: artifact → when it may be deleted
--   naming                 hash: artifact → number of records that reference it
--   needed                 hash: artifact → number of live jobs that read it as input
--   going                  zset: artifact being deleted → start of the deletion
--   held:{artifact}        see holding.lua
--   heavy:{owner}, heavy_bytes:{owner}    see footprint.lua
--   webhooks, webhook_*    see lanes.lua
--   workers                zset: worker → heartbeat;  worker:{id}: its card;  models: hash of cards
--   control:{worker}       stream of messages to a worker
--   holders:{file}         zset: worker that has the file in memory → until when that is known
--   delays:{kombu}         see workers/place.lua
--   checkers               hash: API key → what is done to flagged pictures of its jobs, also once it is revoked
--   paused                 set: queues that workers take no jobs from
--   and those of batches.py, files.py and keys.py, the counters of rates.py, and kombu's message lists (broker.py)
--
-- A reused id inherits nothing from its predecessor: a record's `incarnation`, the id of its first event, is unique.
-- Events carry it; together with the attempt it is the fencing token of a worker's writes; callers that follow, cancel
-- or erase a job pass it.
--
-- A full Redis (`noeviction`) refuses a script's first write if it could need memory; after a first write of another
-- kind it accepts all others. So the script that creates a job (create.lua) begins with a write that is refused, and
-- leaves nothing half done; scripts that end a job or keep it running begin with one that is accepted.
-- include: shared/fairness shared/footprint

local P, V = ARGV[1], VERSION

-- Milliseconds with their fraction, for orders in which those of one millisecond must differ.
local function precisely()
  local t = redis.call('TIME')
  return t[1] * 1000 + t[2] / 1000
end

local function now() return math.floor(precisely()) end

-- A no-op delete as the first write: a full Redis then accepts all later writes.
local function let_through()
  redis.call('ZREM', P .. 'leases', '')
end

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

local function read(id)
  local key = P .. 'job:' .. id
  local v = redis.call('HMGET', key, 'state', 'modality', 'level', 'sequence', 'sent', 'attempt', 'lost', 'work_ms',
    'worker', 'deadline', 'claim', 'by', 'owner', 'webhook', 'inputs', 'digest', 'incarnation', 'v', 'keep_ms', 'offered',
    'model', 'routed', 'most_running')
  if not v[1] then return nil end
  return {id = id, key = key, state = v[1], queue = v[2], level = v[3], sequence = v[4], sent = v[5], attempt = v[6],
    lost = v[7], work_ms = v[8], worker = v[9], deadline = v[10], claim = v[11], by = v[12],
    owner = v[13] or '', webhook = v[14], inputs = v[15] or '', digest = v[16] or '', incarnation = v[17] or '',
    v = v[18], keep_ms = v[19], offered = v[20], model = v[21] or '',
    kombu = v[22] and model_queue(v[2], v[21]) or v[2], most_running = v[23] or ''}
end

-- Whether a job is live and its record's format known: a newer version may use other states.
local function legible(job)
  return (job.state == 'queued' or job.state == 'running') and (tonumber(job.v or 1) or math.huge) <= V
    and job.queue and tonumber(job.attempt) and tonumber(job.lost) and tonumber(job.work_ms)
    and (job.state == 'running' or job.level and tonumber(job.sequence) and tonumber(job.sent))
    and (not job.deadline or tonumber(job.deadline)) and true
end

-- Returns the job if it has this incarnation; '' matches any.
local function read_same(id, incarnation)
  local job = read(id)
  if job and incarnation ~= '' and job.incarnation ~= incarnation then return nil end
  return job
end

-- Whether a fencing token is the current attempt's: the attempt's number and, after an optional @, the incarnation.
local function holds(job, fence)
  local attempt, incarnation = string.match(fence, '^([^@]*)@?(.*)$')
  return job.attempt == attempt and (incarnation == '' or incarnation == job.incarnation)
end

-- The moments in `events` of webhooks that 0.3.0 wrote.
local former = {start = 'started', logs = 'progressed', output = 'succeeded', completed = 'ended'}

-- Whether a webhook is called at a moment of its job (record.Moment); without moments at every end.
local function calls(webhook, moment)
  if not webhook then return false end
  local receiver = cjson.decode(webhook)
  for _, name in ipairs(receiver.moments or receiver.events or {'ended'}) do
    if (former[name] or name) == moment then return true end
  end
  return false
end

-- Whether a webhook is called for a job in this state.
local function tells(webhook, state)
  if state == 'queued' then return false end
  if state == 'running' then return calls(webhook, 'started') or calls(webhook, 'progressed') end
  return calls(webhook, 'ended') or state == 'succeeded' and calls(webhook, 'succeeded')
end

-- Whether a webhook is told of the start of a job in this state: also of an ended one, if it was not told before.
local function starts(webhook, state) return state ~= 'queued' and calls(webhook, 'started') end

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

local function count(job, state, n)
  for _, queue in ipairs(job.kombu == job.queue and {job.queue} or {job.queue, job.kombu}) do
    redis.call('HINCRBY', P .. 'backlog:' .. queue, state, n)
    redis.call('HINCRBY', P .. 'backlog:' .. queue, state .. '_ms', n * job.work_ms + 0)  -- + 0: Redis rejects -0
  end
end

-- One stream wakes all followers; they read only the event streams that it names.
local function notify(ids)
  redis.call('XADD', P .. 'happened', 'MAXLEN', '~', 1000, '*', 'jobs', ids)
end

local function emit(job, type, data, at)
  redis.call('XADD', P .. 'events:' .. job.id, at or '*', 'type', type, 'data', data, 'of', job.incarnation, 'v', V)
  notify(job.id)
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

local function requeue(job, by, at, reason)
  leave(job)
  redis.call('HSET', job.key, 'state', 'queued', 'worker', '', 'by', by)
  redis.call('HDEL', job.key, 'started', 'progress', 'claim', 'offered')
  post(job, 0, at)
  emit(job, 'queued', '{"reason":"' .. reason .. '"}')
end

-- Ends a job; every terminal transition goes through here.
local function finish(job, state, by, at, retention_ms, field, value)
  retention_ms = kept_ms(job, retention_ms)
  local room = leave(job)
  redis.call('ZREM', P .. 'deadlines', job.id)
  redis.call('DEL', P .. 'preview:' .. job.id)
  redis.call('HSET', job.key, 'state', state, 'ended', at, 'by', by)
  if field then redis.call('HSET', job.key, field, value) end
  -- The results of a batch's lines are made of their requests too (batches/note.lua).
  if job.queue == 'text' and job.digest == '' then drop_request(job.key) end
  weigh(job.owner, job.id, excess_bytes(job.key))
  emit(job, state, field == 'error' and value or '{}')
  redis.call('PEXPIRE', job.key, retention_ms)
  redis.call('ZADD', P .. 'ended', at + retention_ms, job.owner .. '|' .. job.id)
  if job.webhook and tells(job.webhook, state) then redis.call('ZADD', P .. 'webhooks', at, job.id) end
  for artifact in string.gmatch(job.inputs, '%S+') do  -- inputs are retained like outputs from now on
    if redis.call('HINCRBY', P .. 'needed', artifact, -1) <= 0 then redis.call('HDEL', P .. 'needed', artifact) end
    redis.call('ZADD', P .. 'kept', 'GT', at + retention_ms + 3600000, artifact)
  end
  -- Followers of an ended job read its record, so its events, half of its memory, expire sooner; a long text's at once.
  local bytes = tonumber(redis.call('HGET', job.key, 'event_bytes')) or 0
  redis.call('PEXPIRE', P .. 'events:' .. job.id, math.min(retention_ms, bytes > large_events and 60000 or 3600000))
  if room then feed(job, at) end
end

local function expire(job, by, at, retention_ms)
  finish(job, 'expired', by, at, retention_ms, 'error',
    '{"code":"expired","message":"the deadline passed before the job was done"}')
end

local function tell_to_cancel(job)
  local key = P .. 'control:' .. job.worker
  redis.call('XADD', key, 'MAXLEN', '~', 1000, '*', 'cancel', job.id, 'attempt', job.attempt, 'of', job.incarnation)
  redis.call('PEXPIRE', key, 3600000)  -- expires if the worker died
end

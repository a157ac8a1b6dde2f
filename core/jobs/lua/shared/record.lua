-- Reads the clock and job records; included by every script of jobs.
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
-- include: shared/fairness

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

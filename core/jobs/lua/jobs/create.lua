-- Creates a job: charges its owner's rate limits, writes the record, enqueues the message or holds it back, returns the
-- queue position.
--
-- It is one script, so that no record is left without a message and no rejected job is charged. If the id is taken, the
-- caller checks whether the existing job is the same.
-- include: shared/events shared/footprint shared/positions shared/charge shared/summary
-- KEYS: none
-- ARGV: 2 one JSON array of strings (a command of thirty arguments is slower to encode than the script is to run): id,
--   modality, model, parameters, priority, level, deadline in ms from now or '', work_ms, max_queued, owner, digest,
--   webhook or '', keys of its input artifacts separated by spaces, trace, request id, whether its progress is followed
--   ('1', '0', or '': unspecified), kombu's list, message or '', how many of the charges below count even if no job is
--   created, minimum retention of the ended record in ms, whether the request came without a key ('1' or ''), limits of the
--   owner's jobs, each '' or: waiting in that queue, live of that model, live in that queue, of that model at workers (see may_send),
--   and bytes that its records may take; the id that the owner chose or ''; charges of five arguments each
-- Answer: numbers separated by spaces: the outcome, how many charges were evaluated, the state of each (5 numbers), and
--   1, created: created, deadline or 0, sequence, jobs ahead of it, queued, their ms, running, their ms
--   0, it existed: nothing more, but the record's summary as a second value
--   -1, the queue is full, -2, the last of these charges exceeds its limit, -3, the owner has too many waiting jobs,
--   -4, the owner may create no more jobs, or keys are required by now, -5, the id was withdrawn, -6, the owner has too
--   many live jobs of the model, or -7, in the queue, -8, its records would take more bytes than they may: nothing more

local A = cjson.decode(ARGV[2])
local id, queue, level, owner = A[1], A[2], A[6], A[10]
local most_waiting, most_of_model, most_live = tonumber(A[22]), tonumber(A[23]), tonumber(A[24])
local key, backlog = P .. 'job:' .. id, P .. 'backlog:' .. queue
-- The first write could need memory: a full Redis refuses it, so nothing is half done.
redis.call('HSETNX', backlog, 'queued', 0)
local new = redis.call('EXISTS', key) == 0
-- The client was told that no job was created and has withdrawn the id since.
if new and redis.call('EXISTS', P .. 'withdrawn:' .. id) == 1 then return '-5 0 ' end
local full = new and tonumber(redis.call('HGET', backlog, 'queued')) >= tonumber(A[9])
local code = full and -1 or new and 1 or 0

-- How many live jobs of these models the owner has, after a repair of what is counted.
local function count_live(names, repair)
  local live = 0
  for _, model in ipairs(names) do
    local of = {queue = queue, model = model, owner = owner}
    if repair then repair_out(of, now()) end
    live = live + live_jobs(of)
  end
  return live
end

local function has_live(names, most) return count_live(names) >= most and count_live(names, true) >= most end

if code == 1 and owner ~= '' then
  local waiting = P .. 'waiting:' .. queue .. ':' .. owner
  if most_waiting and redis.call('SCARD', waiting) >= most_waiting then
    for _, other in ipairs(redis.call('SRANDMEMBER', waiting, few)) do
      local v = redis.call('HMGET', P .. 'job:' .. other, 'state', 'owner')
      if v[1] ~= 'queued' or v[2] ~= owner then redis.call('SREM', waiting, other) end
    end
    if redis.call('SCARD', waiting) >= most_waiting then code = -3 end
  end
  if most_of_model and has_live({A[3]}, most_of_model) then code = -6 end
  if most_live and has_live(models(queue), most_live) then code = -7 end
  if beyond_share(owner, job_bytes + slack * #ARGV[2], tonumber(A[26]), now()) then code = -8 end
  if redis.call('EXISTS', P .. 'barred:' .. owner) == 1 then code = -4 end
end
-- The first key was added since the request was admitted.
if A[21] == '1' and redis.call('GET', P .. 'access') == 'keys' then code = -4 end
local within, told = charge(A, 28, tonumber(A[19]), code < 1)
if not within then code = -2 end
local answer = code .. ' ' .. #told .. ' ' .. table.concat(told, ' ')
if code < 0 then return answer end
if code == 0 then return {answer, summary(key)} end

local at = now()
-- Leftovers of an earlier job with this id do not belong to this one.
redis.call('DEL', P .. 'events:' .. id, P .. 'preview:' .. id)
redis.call('ZREM', P .. 'webhooks', id)
redis.call('HDEL', P .. 'webhook_tries', id)
redis.call('ZREM', P .. 'ended', owner .. '|' .. id)
redis.call('HSET', key, 'v', V, 'state', 'queued', 'modality', queue, 'model', A[3], 'parameters', A[4],
  'priority', A[5], 'created', at, 'attempt', 0, 'lost', 0, 'work_ms', A[8], 'by', 'create',
  'owner', owner, 'digest', A[11], 'keep_ms', A[20], 'trace', A[14], 'request_id', A[15])
-- The result of a batch's line is read by whichever API holds the batch, which may be an older one.
if queue ~= 'text' or A[11] == '' then redis.call('HSET', key, 'lays', 1) end
if A[12] ~= '' then redis.call('HSET', key, 'webhook', A[12]) end
if A[16] ~= '' then redis.call('HSET', key, 'followed', A[16]) end
if A[25] ~= '' then redis.call('HSET', key, 'most_running', A[25]) end
if A[27] ~= '' then redis.call('HSET', key, 'name', A[27]) end
if A[13] ~= '' then
  redis.call('HSET', key, 'inputs', A[13])
  for artifact in string.gmatch(A[13], '%S+') do
    redis.call('HINCRBY', P .. 'naming', artifact, 1)
    redis.call('HINCRBY', P .. 'needed', artifact, 1)
    redis.call('ZADD', P .. 'kept', 'GT', at, artifact)
  end
end
if owner ~= '' then weigh(owner, id, #ARGV[2] > job_fields_bytes / 2 and excess_bytes(key) or 0) end
local order = precisely()  -- finer resolution than `created`: lists use this order
redis.call('ZADD', P .. 'jobs', order, owner .. '|' .. id)
redis.call('ZADD', P .. 'jobs:' .. owner, order, owner .. '|' .. id)
local job = {id = id, key = key, queue = queue, work_ms = A[8], owner = owner, model = A[3],
  most_running = A[25]}
local deadline = 0
if A[7] ~= '' then
  deadline = at + A[7]
  redis.call('HSET', key, 'deadline', deadline)
  redis.call('ZADD', P .. 'deadlines', deadline, id)
end
local held = owner ~= '' and A[18] ~= '' and
  (redis.call('EXISTS', key_of('flow', job)) == 1 or not may_send(job, level))
local sequence = held and hold_back(job, level, at, A[17], A[18]) or post(job, level, at)
job.incarnation = string.format('%.0f-%d', at, sequence)
redis.call('HSET', key, 'incarnation', job.incarnation)
emit(job, 'queued', '{}', job.incarnation)
-- The record is authoritative: a sweep finds that a message is missing and sends it again.
if held then
  feed(job, at)
elseif A[18] ~= '' then
  redis.pcall('LPUSH', A[17], A[18])
end

local ahead = jobs_ahead(job, level, sequence)
local b = redis.call('HMGET', backlog, 'queued', 'queued_ms', 'running', 'running_ms')
return table.concat({answer, at, deadline, sequence, ahead, b[1], b[2], b[3] or 0, b[4] or 0}, ' ')

-- Appends the events of jobs, and messages to their workers.
-- include: shared/record

-- One stream wakes all followers; they read only the event streams that it names.
local function notify(ids)
  redis.call('XADD', P .. 'happened', 'MAXLEN', '~', 1000, '*', 'jobs', ids)
end

local function emit(job, type, data, at)
  redis.call('XADD', P .. 'events:' .. job.id, at or '*', 'type', type, 'data', data, 'of', job.incarnation, 'v', V)
  notify(job.id)
end

local function tell_to_cancel(job)
  local key = P .. 'control:' .. job.worker
  redis.call('XADD', key, 'MAXLEN', '~', 1000, '*', 'cancel', job.id, 'attempt', job.attempt, 'of', job.incarnation)
  redis.call('PEXPIRE', key, 3600000)  -- expires if the worker died
end

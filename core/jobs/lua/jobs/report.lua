-- Writes progress into records and into the event streams of followed jobs.
--
-- A text job's result is sent in pieces, in events only: the record's progress stays small, and the bytes written are
-- linear in the length of the text; they count as bytes of its owner's. A job that nobody follows (`followed` is 0, set only at creation) gets no event.
-- include: shared/events shared/retention shared/moments shared/footprint
-- KEYS: none
-- ARGV: for each job: id, fencing token, data, the event's data or '' (same as the record's), whether it replaces all
--   earlier progress ('1', ''), how many values follow, picture, preview, …
-- Answer: {{ids with a stale fencing token}, {followed ids}}

local stale, followed, told = {}, {}, {}
local i = 2
while i <= #ARGV do
  local job, event, looks = read(ARGV[i]), ARGV[i + 3], tonumber(ARGV[i + 5])
  if job and job.state == 'running' and holds(job, ARGV[i + 1]) then
    if looks > 0 then
      redis.call('HSET', P .. 'preview:' .. job.id, 'of', job.incarnation, unpack(ARGV, i + 6, i + 5 + looks))
      redis.call('PEXPIRE', P .. 'preview:' .. job.id, 60000)
    end
    local stream, follows = P .. 'events:' .. job.id, redis.call('HGET', job.key, 'followed')
    if follows ~= '0' then
      local id
      if follows ~= '1' then
        id = redis.call('XADD', stream, 'MAXLEN', '~', 1000, '*', 'type', 'progress', 'data', ARGV[i + 2],
          'of', job.incarnation, 'v', V)
      else  -- never trimmed: the text is incomplete without each piece
        local bytes = redis.call('HINCRBY', job.key, 'event_bytes', #event)
        if math.floor(bytes / large_events) > math.floor((bytes - #event) / large_events) then
          weigh(job.owner, job.id, excess_bytes(job.key) + bytes)
        end
        id = redis.call('XADD', stream, '*', 'type', 'progress', 'data', event ~= '' and event or ARGV[i + 2],
          'of', job.incarnation, 'v', V)
      end
      if ARGV[i + 4] == '1' then
        local old = {}
        for _, entry in ipairs(redis.call('XRANGE', stream, '-', '(' .. id)) do
          if entry[2][2] == 'progress' then old[#old + 1] = entry[1] end
        end
        for first = 1, #old, 1000 do
          redis.call('XDEL', stream, unpack(old, first, math.min(first + 999, #old)))
        end
      end
      told[#told + 1] = job.id
    end
    if follows == '1' then followed[#followed + 1] = job.id end
    redis.call('HSET', job.key, 'progress', ARGV[i + 2])
    if calls(job.webhook, 'progressed') then redis.call('ZADD', P .. 'webhooks', 'NX', now() + 500, job.id) end
  else
    stale[#stale + 1] = ARGV[i]
  end
  i = i + 6 + looks
end
if #told > 0 then notify(table.concat(told, ' ')) end
return {stale, followed}

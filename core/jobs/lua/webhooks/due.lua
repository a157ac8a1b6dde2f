-- Returns webhooks that are due and hides them for a time; they become due again unless they are settled.
-- include: shared/moments shared/lanes
-- KEYS: none
-- ARGV: 2 visibility timeout in ms, 3 limit, 4 limit per owner, 5 limit per lane, 6 {owners: {…}, lanes: {…}} to skip,
--   as JSON
-- Answer: {job, tries, owner, receiver, incarnation, whether the message is of a job that runs (1 or 0), …}

local intake = 1000  -- jobs moved to their lanes per call
let_through()
local at = now()
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'webhooks', '-inf', at, 'LIMIT', 0, intake)) do
  redis.call('ZREM', P .. 'webhooks', id)
  local v = redis.call('HMGET', P .. 'job:' .. id, 'owner', 'webhook')
  local host = host_of(v[2])
  if host then
    enter(v[1] or '', host, id, at)
  else
    redis.call('HDEL', P .. 'webhook_tries', id)  -- the job was erased meanwhile
  end
end

local found, left, skipped = {}, tonumber(ARGV[3]), cjson.decode(ARGV[6])
local some = left + 100  -- more than can be skipped
for _, owner in ipairs(redis.call('ZRANGEBYSCORE', owners, '-inf', at, 'LIMIT', 0, some)) do
  if left <= 0 then break end
  if not skipped.owners[owner] then
    local mine = math.min(left, tonumber(ARGV[4]))
    for _, host in ipairs(redis.call('ZRANGEBYSCORE', lanes_of(owner), '-inf', at, 'LIMIT', 0, some)) do
      if mine <= 0 then break end
      if not skipped.lanes[owner .. '|' .. host] then
        local lane = lane_of(owner, host)
        local most = math.min(mine, tonumber(ARGV[5]))
        for _, id in ipairs(redis.call('ZRANGEBYSCORE', lane, '-inf', at, 'LIMIT', 0, most)) do
          local v = redis.call('HMGET', P .. 'job:' .. id, 'state', 'owner', 'webhook', 'incarnation')
          if not v[1] or (v[2] or '') ~= owner or host_of(v[3]) ~= host or not (tells(v[3], v[1]) or starts(v[3], v[1]))
              or redis.call('ZSCORE', P .. 'webhooks', id) then
            redis.call('ZREM', lane, id)  -- its job is gone; a new job with the same id has its own entry
            if not v[1] then redis.call('HDEL', P .. 'webhook_tries', id) end
          else
            redis.call('ZADD', lane, at + ARGV[2], id)
            local tries = redis.call('HGET', P .. 'webhook_tries', id) or '0'
            local lives = (v[1] == 'running' or not tells(v[3], v[1])) and '1' or '0'
            for _, value in ipairs({id, tries, owner, host, v[4] or '', lives}) do found[#found + 1] = value end
            mine, left = mine - 1, left - 1
          end
        end
        turn(lanes_of(owner), host, lane, at)
      end
    end
    turn(owners, owner, lanes_of(owner), at)
  end
end
return found

-- Schedules webhooks in lanes, one per owner and receiver; owners and their lanes are served round-robin.
--
--   webhooks                   zset: job → when it ended; the intake, from which jobs move to their lanes
--   webhook_tries              hash: job → failed deliveries
--   webhook_owners             zset: owner → its next turn
--   webhook_lanes:{owner}      zset: receiver → its next turn
--   webhooks:{owner}|{receiver}    zset: job → its next delivery
-- include: shared/record

local owners = P .. 'webhook_owners'

local function lanes_of(owner) return P .. 'webhook_lanes:' .. owner end
local function lane_of(owner, host) return P .. 'webhooks:' .. owner .. '|' .. host end

local function host_of(webhook)
  local url = webhook and cjson.decode(webhook).url
  return url and string.lower(string.match(url, '^%a+://([^/?#]*)') or '')
end

local function enter(owner, host, id, at)
  redis.call('ZADD', lane_of(owner, host), at, id)
  redis.call('ZADD', lanes_of(owner), 'LT', at, host)
  redis.call('ZADD', owners, 'LT', at, owner)
end

-- Moves an entry of a turn list behind all waiting entries, or to the time when its first delivery is due.
local function turn(list, entry, of, at)
  local first = redis.call('ZRANGE', of, 0, 0, 'WITHSCORES')
  if first[2] then
    redis.call('ZADD', list, math.max(first[2], at), entry)
  else
    redis.call('ZREM', list, entry)
  end
end

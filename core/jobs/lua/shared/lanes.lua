-- Webhooks wait in lanes, one for each owner and receiver; owners, and their lanes, are served in turn.
--
--   webhooks                   zset: job → when it ended; from here they go to their lanes
--   webhook_tries              hash: job → how often telling it failed
--   webhook_owners             zset: owner → when it is its turn
--   webhook_lanes:{owner}      zset: receiver → when it is its turn
--   webhooks:{owner}|{receiver}    zset: job → when it is told next
-- include: shared/transitions

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

-- An entry of a list of turns goes behind all that wait now, or to when the first of what it stands for is due.
local function turn(list, entry, of, at)
  local first = redis.call('ZRANGE', of, 0, 0, 'WITHSCORES')
  if first[2] then
    redis.call('ZADD', list, math.max(first[2], at), entry)
  else
    redis.call('ZREM', list, entry)
  end
end

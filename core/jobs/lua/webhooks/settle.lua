-- Removes a webhook from its lane, or schedules a retry.
--
-- The job's record is kept until its webhook is settled; normal retention applies from then on.
-- include: shared/moments shared/lanes
-- KEYS: none
-- ARGV: 2 job, 3 owner, 4 receiver, 5 ms until the retry or '': it is settled, 6 whether this was an attempt (1 or 0),
--   7 retention_ms, 8 incarnation: a later job with the same id stays untouched, 9 whether the message was of a
--   job that ran (1 or 0): then its end, if it is told, has an entry of its own and stays untouched too
-- Answer: nothing

local id, owner, host, at = ARGV[2], ARGV[3], ARGV[4], now()
local lane = lane_of(owner, host)
local v = redis.call('HMGET', P .. 'job:' .. id, 'state', 'incarnation', 'ended', 'owner', 'webhook')
if v[1] and ((v[2] or '') ~= ARGV[8] or ARGV[9] == '1' and v[3] and tells(v[5], v[1])) then return end
if ARGV[5] == '' or not v[1] then
  redis.call('ZREM', lane, id)
  redis.call('HDEL', P .. 'webhook_tries', id)
  turn(lanes_of(owner), host, lane, at)
  turn(owners, owner, lanes_of(owner), at)
  if v[3] then
    redis.call('PEXPIREAT', P .. 'job:' .. id, v[3] + ARGV[7])
    redis.call('ZADD', P .. 'ended', 'XX', v[3] + ARGV[7], (v[4] or '') .. '|' .. id)
  end
elseif redis.call('ZSCORE', lane, id) then
  if ARGV[6] == '1' then redis.call('HINCRBY', P .. 'webhook_tries', id, 1) end
  enter(owner, host, id, at + ARGV[5])
end

-- Takes a job from its lane, or has it tried again.
--
-- Its record was kept until it is settled, and goes as others from then on.
-- include: shared/lanes
-- KEYS: none
-- ARGV: 2 job, 3 owner, 4 receiver, 5 ms until it is tried again or '': it is settled, 6 whether that was a try (1 or
--   0), 7 retention_ms
-- Answer: nothing

local id, owner, host, at = ARGV[2], ARGV[3], ARGV[4], now()
local lane = lane_of(owner, host)
if ARGV[5] == '' then
  redis.call('ZREM', lane, id)
  redis.call('HDEL', P .. 'webhook_tries', id)
  turn(lanes_of(owner), host, lane, at)
  turn(owners, owner, lanes_of(owner), at)
  local v = redis.call('HMGET', P .. 'job:' .. id, 'ended', 'owner')
  if v[1] then
    redis.call('PEXPIREAT', P .. 'job:' .. id, v[1] + ARGV[7])
    redis.call('ZADD', P .. 'ended', 'XX', v[1] + ARGV[7], (v[2] or '') .. '|' .. id)
  end
elseif redis.call('ZSCORE', lane, id) then
  if ARGV[6] == '1' then redis.call('HINCRBY', P .. 'webhook_tries', id, 1) end
  enter(owner, host, id, at + ARGV[5])
end

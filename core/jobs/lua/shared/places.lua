-- Counts the places of workers: how many jobs of each queue all of them take at once.
-- include: shared/record

-- Takes a worker's places out of the sums. Its first write frees memory.
local function forget_places(worker)
  redis.call('ZREM', P .. 'placed', worker)
  local own = redis.call('HGETALL', P .. 'places:' .. worker)
  redis.call('DEL', P .. 'places:' .. worker)
  for i = 1, #own, 2 do
    if redis.call('HINCRBY', P .. 'places', own[i], -own[i + 1]) <= 0 then redis.call('HDEL', P .. 'places', own[i]) end
  end
end

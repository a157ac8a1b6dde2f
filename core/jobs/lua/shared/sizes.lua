-- Maintains the total size of an owner's files in bytes.
-- include: shared/holding

local function discount(owner, id)
  local sizes = P .. 'file_sizes:' .. owner
  local size = redis.call('HGET', sizes, id)
  if size then
    redis.call('HINCRBY', sizes, 'total', -size)
    redis.call('HDEL', sizes, id)
  end
end

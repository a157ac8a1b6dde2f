-- Lists jobs, newest first, and drops index entries whose record is gone.
-- include: shared/record
-- KEYS: none
-- ARGV: 2 owner ('*': all owners), 3 state or '', 4 model or '', 5 limit, 6 cursor: id to continue after or '',
--   7 maximum number of entries to examine, 8 first rank, 9 modality or ''
-- Answer: {the last id examined or '', whether there may be more, the rank to continue at, id, …}; or 0: the cursor's
--   job does not exist

local index = ARGV[2] == '*' and P .. 'jobs' or P .. 'jobs:' .. ARGV[2]
local state, model, limit, looks = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[7])
local from, modality = tonumber(ARGV[8]), ARGV[9]
if ARGV[6] ~= '' and from == 0 then
  local owner = redis.call('HGET', P .. 'job:' .. ARGV[6], 'owner')
  local rank = owner and redis.call('ZREVRANK', index, owner .. '|' .. ARGV[6])
  if not rank then return 0 end
  from = rank + 1
end
local found, last, looked = {}, '', 0
while looked < looks do
  local entries = redis.call('ZREVRANGE', index, from, from + 99)
  for _, entry in ipairs(entries) do
    local owner, id = string.match(entry, '^([^|]*)|(.*)$')
    local v = redis.call('HMGET', P .. 'job:' .. id, 'state', 'model', 'owner', 'modality')
    if v[3] ~= owner then v = {} end  -- another owner's job has the id now
    if v[1] and (state == '' or v[1] == state) and (model == '' or v[2] == model)
      and (modality == '' or v[4] == modality) then
      if #found >= limit then return {last, '1', from, unpack(found)} end
      found[#found + 1] = id
    end
    -- Listing must work on a Redis that refuses writes.
    local dropped = not v[1] and redis.pcall('ZREM', P .. 'jobs:' .. owner, entry)
    if type(dropped) == 'number' then
      redis.pcall('ZREM', P .. 'jobs', entry)
    else
      from = from + 1
    end
    if v[1] then last = id end
    looked = looked + 1
  end
  if #entries < 100 then return {last, '0', from, unpack(found)} end
end
return {last, '1', from, unpack(found)}

-- Reads records of an index in its order, from a rank on; those whose record is gone are passed over.
-- KEYS: none
-- ARGV: 2 index, 3 kind of its records, 4 'asc' or 'desc', 5 first rank, 6 limit, 7 maximum number of entries to examine,
--   8 a field or '', 9 the value that it has in the records of the list, 10 bytes that may be read
-- Answer: {the rank to continue at, whether the index has more entries: 0 or 1; or 2, the next record is beyond the bytes,
--   id, {its fields}, …}; the first record is read whatever its bytes

local P, range = ARGV[1], ARGV[4] == 'asc' and 'ZRANGE' or 'ZREVRANGE'
local rank, limit, looks = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local entries = redis.call(range, P .. ARGV[2], rank, rank + looks)
local found, count, room = {}, 0, tonumber(ARGV[10])
for i = 1, math.min(#entries, looks) do
  if count >= limit then return {rank, 1, unpack(found)} end
  local key = P .. ARGV[3] .. ':' .. entries[i]
  if ARGV[8] == '' or redis.call('HGET', key, ARGV[8]) == ARGV[9] then
    local fields = redis.call('HGETALL', key)
    for _, text in ipairs(fields) do room = room - #text end
    if room < 0 and count > 0 then return {rank, 2, unpack(found)} end
    if #fields > 0 then
      found[#found + 1], found[#found + 2] = entries[i], fields
      count = count + 1
    end
  end
  rank = rank + 1
end
return {rank, #entries > looks and 1 or 0, unpack(found)}

-- Reads the records of jobs as far as lists show them.
-- include: shared/summary
-- KEYS: none
-- ARGV: 2 bytes that may be read, id, …
-- Answer: the fields of each job, or nothing where there is none. It ends before the job with which more bytes would be
--   read, but not before the first

local room, answer = tonumber(ARGV[2]), {}
for k = 3, #ARGV do
  local key = P .. 'job:' .. ARGV[k]
  room = room - summary_bytes(key)
  if room < 0 and k > 3 then break end
  answer[#answer + 1] = summary(key)
end
return answer

-- Announces that an artifact is about to be written, and keeps it for a time.
-- include: shared/holding
-- KEYS: none
-- ARGV: 2 keep_ms, 3 artifact, 4 '1': keep it even if jobs are erased meanwhile
-- Answer: 1: it may be written and is kept for at least keep_ms; 0: it is being deleted now

let_through()
if redis.call('ZSCORE', P .. 'going', ARGV[3]) then return 0 end
local at = now()
if ARGV[4] == '1' then
  hold(ARGV[3], 'upload', at + ARGV[2], at)
elseif redis.call('ZADD', P .. 'kept', 'GT', 'CH', at + ARGV[2], ARGV[3]) == 0 then
  -- It exists and is kept longer: a concurrent release must see that it is being written again.
  hold(ARGV[3], 'made', at + named_ms, at)
end
return 1

-- Says that an artifact is about to be made.
-- include: shared/transitions shared/holding
-- KEYS: none
-- ARGV: 2 keep_ms, 3 artifact, 4 '1': whatever jobs are erased meanwhile
-- Answer: 1: it may be made, and stays so long at least; 0: it is being deleted at this moment

let_through()
if redis.call('ZSCORE', P .. 'going', ARGV[3]) then return 0 end
local at = now()
if ARGV[4] == '1' then
  hold(ARGV[3], 'upload', at + ARGV[2], at)
elseif redis.call('ZADD', P .. 'kept', 'GT', 'CH', at + ARGV[2], ARGV[3]) == 0 then
  -- It is there, for longer: who lets it go meanwhile must know that it is made again.
  hold(ARGV[3], 'made', at + named_ms, at)
end
return 1

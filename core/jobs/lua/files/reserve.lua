-- Places a hold on the artifact of a file that is about to be written.
-- include: shared/holding
-- KEYS: none
-- ARGV: 2 id, 3 artifact, 4 ms
-- Answer: 1: it may be written, and is held that long for the file of this id; 0: it is being deleted

let_through()
if redis.call('ZSCORE', P .. 'going', ARGV[3]) then return 0 end
local at = now()
hold(ARGV[3], ARGV[2], at + ARGV[4], at)
return 1

-- Opens a service that has no keys any more.
-- include: shared/transitions
-- KEYS: none
-- ARGV: none
-- Answer: 1, or 0: there are keys

let_through()
if redis.call('HLEN', P .. 'keys') > 0 then return 0 end
redis.call('SET', P .. 'access', 'open')
return 1

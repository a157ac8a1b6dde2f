-- Lifts the key requirement of a service whose keys were all deleted.
-- include: shared/record
-- KEYS: none
-- ARGV: none
-- Answer: 1, or 0: keys exist

let_through()
if redis.call('HLEN', P .. 'keys') > 0 then return 0 end
redis.call('SET', P .. 'access', 'open')
return 1

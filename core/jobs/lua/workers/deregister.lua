-- Removes a worker that ends: its card, its control stream and its places.
-- include: shared/places
-- KEYS: none
-- ARGV: 2 worker
-- Answer: nothing

forget_places(ARGV[2])
redis.call('DEL', P .. 'worker:' .. ARGV[2], P .. 'control:' .. ARGV[2])
redis.call('ZREM', P .. 'workers', ARGV[2])

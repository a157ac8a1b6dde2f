-- Takes back charges whose purpose was refused: from the current window and, as far as it has less, the previous one.
-- KEYS: none
-- ARGV: 2… the five values of each charge
-- Answer: nothing

redis.call('DEL', ARGV[1] .. 'refund')  -- a full Redis accepts all writes after one that frees memory
for i = 2, #ARGV, 5 do
  local left = tonumber(ARGV[i + 4])
  for _, key in ipairs({ARGV[i + 1], ARGV[i]}) do
    local back = math.min(left, tonumber(redis.call('GET', key) or 0))
    if back > 0 then redis.call('INCRBY', key, -back) end
    left = left - back
  end
end

-- Counts against rate limits with the scripts of the `limits` library, which rates.py passes in as functions.

-- A limit's state for the charge at list[i … i + 4]
local function window(list, i)
  local w = limits_window({list[i], list[i + 1]}, {list[i + 3]})
  return table.concat({w[1] or 0, w[2], w[3] or 0, w[4]}, ' ')
end

-- Counts the charges at list[first …] in their order, up to the first that exceeds its limit: then those after the first
-- `always` are taken back, so that they count together or not at all. With `only_always` these alone are counted.
-- → whether all were within their limits, and the states of those that were evaluated: 1 or 0, and the limit's state
local function charge(list, first, always, only_always)
  local within, states = true, {}
  for i = first, #list, 5 do
    if only_always and #states >= always then break end
    within = limits_acquire({list[i], list[i + 1]}, {list[i + 2], list[i + 3], list[i + 4]})
    states[#states + 1] = (within and '1 ' or '0 ') .. window(list, i)
    if not within then
      for j = always + 1, #states - 1 do
        local at = first + 5 * (j - 1)
        redis.call('INCRBY', list[at + 1], 0 - list[at + 4])
        states[j] = '1 ' .. window(list, at)
      end
      break
    end
  end
  return within and true or false, states
end

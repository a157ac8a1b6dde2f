-- Counts against rate limits with the scripts of the `limits` library, which rates.py passes in as functions.

-- Counts the charge at list[i … i + 4] → whether it was within the limit, and the limit's state
local function charge(list, i)
  local keys = {list[i], list[i + 1]}
  local within = limits_acquire(keys, {list[i + 2], list[i + 3], list[i + 4]})
  local w = limits_window(keys, {list[i + 3]})
  return within, (within and '1 ' or '0 ') .. table.concat({w[1] or 0, w[2], w[3] or 0, w[4]}, ' ')
end

-- Counts against rate limits, with the scripts of the `limits` library: rates.py hands them in as functions.

-- Counts what the five values of a list from the i-th on say → whether it was within, and how it stands
local function charge(list, i)
  local keys = {list[i], list[i + 1]}
  local within = limits_acquire(keys, {list[i + 2], list[i + 3], list[i + 4]})
  local w = limits_window(keys, {list[i + 3]})
  return within, (within and '1 ' or '0 ') .. table.concat({w[1] or 0, w[2], w[3] or 0, w[4]}, ' ')
end

-- Tells at which moments of a job its webhook is called.

-- The moments in `events` of webhooks that 0.3.0 wrote.
local former = {start = 'started', logs = 'progressed', output = 'succeeded', completed = 'ended'}

-- Whether a webhook is called at a moment of its job (record.Moment); without moments at every end.
local function calls(webhook, moment)
  if not webhook then return false end
  local receiver = cjson.decode(webhook)
  for _, name in ipairs(receiver.moments or receiver.events or {'ended'}) do
    if (former[name] or name) == moment then return true end
  end
  return false
end

-- Whether a webhook is called for a job in this state.
local function tells(webhook, state)
  if state == 'queued' then return false end
  if state == 'running' then return calls(webhook, 'started') or calls(webhook, 'progressed') end
  return calls(webhook, 'ended') or state == 'succeeded' and calls(webhook, 'succeeded')
end

-- Whether a webhook is told of the start of a job in this state: also of an ended one, if it was not told before.
local function starts(webhook, state) return state ~= 'queued' and calls(webhook, 'started') end

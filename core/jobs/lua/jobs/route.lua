-- Moves a queued job, which an older version has sent to the queue of all models, to the queue of its model.
-- include: shared/queue
-- KEYS: none
-- ARGV: 2 id
-- Answer: {the queue, the model, the level}; or nothing: the job is not queued, of a newer version, or there already

local job = read(ARGV[2])
if not job or job.state ~= 'queued' or not legible(job) or job.kombu == model_queue(job.queue, job.model) then
  return false
end
leave(job)
post(job, job.level, now())
return {job.queue, job.model, job.level}

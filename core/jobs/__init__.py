"""Jobs as Redis holds them: records, leases, events, workers. Knows nothing of pictures, tokens, HTTP or Celery."""

"""Worker processes: each owns a device, builds the engine and its runners, and serves jobs from the queues."""

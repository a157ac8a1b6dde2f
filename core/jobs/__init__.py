"""Job state in Redis: records, leases, events and worker announcements."""

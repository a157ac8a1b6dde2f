"""What a worker holds of the store: messages, claims, leases, and what it writes of its jobs."""

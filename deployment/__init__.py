"""A whole local deployment from one command: Redis, a worker and the API as children of one process."""

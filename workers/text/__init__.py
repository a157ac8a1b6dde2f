"""Text: the handler of its jobs, the pool of its models, and what streams."""

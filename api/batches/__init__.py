"""Batches: requests in a file, run as the queue has room."""

"""Threads, child processes and memory that tenants share, with bounds for each tenant."""

"""Processes that own a device. Knows how runners and engine are put together; knows nothing of HTTP."""

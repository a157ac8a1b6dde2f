"""Measurements that print a table for people and one JSON object last. Nothing below imports it."""

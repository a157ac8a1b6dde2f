"""The path from prompt to image: the runner of image requests, their iterations and their state; families and backends
below.
"""

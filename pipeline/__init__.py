"""The path from prompt to image: the runner of requests, their iterations and state; families and backends below."""

"""Jobs: checks and creates them, follows them to their ends, and tells receivers of webhooks."""

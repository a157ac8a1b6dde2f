"""Cog's HTTP API and Replicate's API: predictions over the same jobs as all other endpoints."""

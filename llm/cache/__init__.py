"""Allocates the KV cache's pages to sequences."""

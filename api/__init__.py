"""The REST API. Imports no torch, and does no image processing beyond uploads."""

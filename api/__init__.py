"""The REST API. Knows HTTP and jobs; knows no torch, no models and no pictures."""

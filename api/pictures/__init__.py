"""Endpoints that make, edit and serve pictures, and the pictures that requests bring."""

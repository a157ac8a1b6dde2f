"""SDXL, from prompt to image."""

"""Loads text models, and makes their quantized variants."""

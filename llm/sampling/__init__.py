"""Chooses the next tokens from logits."""

"""Guesses the next tokens, which the model verifies: speculative decoding."""

"""The room of prompts to conditioning: chunks of tokens, weights of words, textual inversions, and the cache of
embeddings.
"""

"""The room of prompts: chunks of tokens, weights of words, textual inversions, and the cache of embeddings."""

"""Text generation, from prompt to tokens."""

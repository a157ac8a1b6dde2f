"""Text, from prompt to tokens. Knows nothing of pictures, queues or HTTP."""

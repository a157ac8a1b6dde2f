"""SDXL, from prompt to picture. Knows nothing of text models, queues or HTTP."""

"""What is particular to making SDXL's UNet fast. Knows nothing of prompts, requests or pictures."""

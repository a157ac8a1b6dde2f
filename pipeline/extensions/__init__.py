"""What a request brings along: LoRAs, control networks, image prompts, the refiner, upscalers, and their files."""

"""Extensions of requests: LoRAs, control networks, image prompts, the refiner, upscalers, and their files."""

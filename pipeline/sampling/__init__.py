"""The room of denoising: samplers as tables of seven numbers a step, batched steps, and DeepCache's features."""

"""Shared by image and text generation: settings, jobs, batching, CUDA graphs, quantization."""

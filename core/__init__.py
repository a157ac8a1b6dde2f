"""Shared by the image and text panels: settings, jobs, batching, CUDA graphs, quantization."""

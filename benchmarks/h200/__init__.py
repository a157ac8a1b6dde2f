"""Benchmarks on an H200: kernels alone, then the whole SDXL pipeline built on them."""

"""Measurements on a lent H200: kernels alone, then the whole SDXL pipeline made of them."""

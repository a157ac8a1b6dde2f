"""Optimized execution of SDXL's UNet and VAE decoder."""

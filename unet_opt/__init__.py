"""The optimized execution of SDXL's UNet and VAE decoder."""

ALPHA = 0.65  # the usual strength of SmoothQuant in linear layers: docs/quantize.md

"""Quantization for both panels: ranges, smoothing, INT8 and FP8 layers. Knows modules; knows no UNet and no Llama."""

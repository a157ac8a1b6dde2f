"""Quantization for both panels: ranges, smoothing, INT8 and FP8 layers."""

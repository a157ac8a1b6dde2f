"""Quantization for both modalities: ranges, smoothing, INT8 and FP8 layers."""

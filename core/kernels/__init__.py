"""Kernels of the quantization core, one folder per kind of device."""

"""Kernels of the quantization core, a folder for each kind of device. Knows bytes and floats; knows no layers."""

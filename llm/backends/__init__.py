"""Runs a text model's forwards: by torch, as programs of CPU kernels, or by fused kernels on a GPU."""

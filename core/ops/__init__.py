"""The operations that networks are written in, and their lowerings: torch, CPU programs, fused CUDA kernels."""

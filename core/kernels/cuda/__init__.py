"""Kernels for NVIDIA GPUs: CUDA C++ compiled at run time for Hopper, Triton for everything else.

Importing these modules needs neither Triton nor a GPU; running them does. `language.lacks()` and `driver.lacks()` say
why not. Each public function has a twin `…_reference` in plain PyTorch with the same meaning.
"""

"""INT8 on x86 processors: C++ kernels, compiled for this machine on first use, and programs of calls to them."""

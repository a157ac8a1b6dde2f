"""INT8 on x86 processors: kernels in C++, compiled for the machine at hand when first needed, and programs of them."""

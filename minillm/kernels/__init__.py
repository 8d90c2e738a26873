"""Triton kernels: what runs on a GPU, under TRITON_INTERPRET=1 on a CPU, and compiles anywhere.

One kernel per file; `launch.py` holds the tile sizes. The kernel files import triton, so nothing on the
street imports this package before a kernel is asked for.
"""

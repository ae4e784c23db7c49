"""Floor 2: kernels for NVIDIA GPUs, compiled ahead of time from ``plugins/tree_attention/gpu``; no GPU is needed.

``shape``: what a kernel is compiled for. ``compilation``: cubin and PTX of every architecture. ``launches``: grids,
arguments and workspace of a call. ``triton`` (the language) and ``torch`` are imported where they are used.
"""

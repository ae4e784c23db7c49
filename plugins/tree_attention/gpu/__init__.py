"""Kernels of TreeAttention and of commit in the Triton language; ``draftline.kernels`` loads and compiles them.

Arguments and constants have the names, shapes and dtypes of ``../contract.yaml``.
"""

"""Engines of TensorRT and TensorRT-RTX, from one code base: the vendor's module is a parameter (``Vendor``)."""

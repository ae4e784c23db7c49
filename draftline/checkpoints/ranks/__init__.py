"""TensorRT-LLM's checkpoint format for several GPUs: ``config.json`` and a ``rankN.safetensors`` for each.

A tensor's *whole* is what one rank alone would have; ``cuts`` says which rows or columns of it each rank holds.
"""

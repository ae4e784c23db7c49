"""TensorRT-LLM's checkpoint format for several GPUs: ``config.json`` and ``rank0.safetensors`` .. ``rankN.safetensors``.

A tensor's *whole* is what one rank alone would have; ``cuts`` says which rows or columns of it each rank holds.
"""

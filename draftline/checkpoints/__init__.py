"""Floor 2: checkpoints. One reader per format, weight maps as data tables, one writer (TensorRT-LLM's layout)."""

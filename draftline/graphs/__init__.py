"""Floor 3: networks. Python functions that emit ONNX graphs whose attention nodes are ``draftline::TreeAttention``."""

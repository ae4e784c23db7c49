"""draftline: build and serve models with speculative decoding, from one YAML file."""

__version__ = "0.1.0"

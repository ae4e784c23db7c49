"""Measurements: this engine against transformers, and the served model against the engine in process."""

"""Triton: the classic ensemble's contract, the model repository, the server process and the client."""

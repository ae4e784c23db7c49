"""Triton's entry to TensorRT-LLM's own ``llmapi`` model: its code is TensorRT-LLM's, its settings are ``model.yaml``.

The code is taken from where NVIDIA's container has it. Elsewhere copy the Python files of TensorRT-LLM's
``triton_backend/all_models/llmapi/tensorrt_llm/1`` over this one.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

FOLDER = Path("/app/all_models/llmapi/tensorrt_llm/1")

if not (FOLDER / "model.py").is_file():
    raise FileNotFoundError(
        f"{FOLDER}/model.py: TensorRT-LLM's llmapi model is there; got no such file; run the server in NVIDIA's "
        f"container with TensorRT-LLM, or copy that model's Python files over {__file__}"
    )
sys.path.insert(0, str(FOLDER))  # its helpers
specification = importlib.util.spec_from_file_location("tensorrt_llm_llmapi_model", FOLDER / "model.py")
assert specification is not None
assert specification.loader is not None
module = importlib.util.module_from_spec(specification)
sys.modules[specification.name] = module
specification.loader.exec_module(module)
TritonPythonModel = module.TritonPythonModel

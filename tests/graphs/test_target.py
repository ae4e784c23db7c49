"""The target's graph."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from draftline.sessions.native_kernels import Kernels
from tests.sessions.tiny_engines import build_tiny_engine
from tests.tiny_checkpoints import write_tiny_checkpoint


@pytest.mark.parametrize("kernels", ["native", "onnxruntime"])
@pytest.mark.parametrize("captured_layers", [(0,), (0, 1), (1,)], ids=str)
def test_taps_change_no_node_of_the_forward(tmp_path: Path, kernels: Kernels, captured_layers: tuple[int, ...]) -> None:
    """A sum that another kernel adds has other bits: an EAGLE-3 head once changed the texts of int8 engines."""
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint")
    nodes = []
    for number, layers in enumerate((None, captured_layers)):
        (tmp_path / f"{number}").mkdir()
        engine = build_tiny_engine(tmp_path / f"{number}", checkpoint, kernels=kernels, captured_layers=layers)
        model = onnx.load(engine / "model.onnx", load_external_data=False)
        nodes.append([node.SerializeToString(deterministic=True) for node in model.graph.node])
    plain, tapped = nodes
    assert set(plain) < set(tapped)
    assert [node for node in tapped if node in set(plain)] == plain
    assert len(tapped) == len(plain) + 2, "the final norm of all rows, and what joins the features"

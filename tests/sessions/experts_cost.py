"""``python -m tests.sessions.experts_cost``: what a layer of experts takes natively, the chosen ones and all of them.

Both forms multiply the same random bytes in int8, on one thread, in turns; the default shape is Qwen3-30B-A3B's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import TensorProto

from draftline.checkpoints.config import Experts
from draftline.graphs.experts import ExpertLayer
from draftline.graphs.linear import Linear
from draftline.graphs.native_operators import NATIVE, NativeOperators
from draftline.graphs.onnx_graph import OnnxGraph, TensorLocation
from draftline.quantization import BLOCK, TILE
from draftline.sessions.native_kernels import find_library

NUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
WEIGHTS_FILE = "weights.bin"


class WideOperators(NativeOperators):
    """Native operators that multiply with all experts."""

    multiplies_chosen = False


class WeightsFile:
    """Random tensors, one behind the other; a name may be given to the bytes of another."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / WEIGHTS_FILE
        self.locations: dict[str, TensorLocation] = {}
        self._random = np.random.default_rng(0)

    def add_codes(self, name: str, shape: tuple[int, ...]) -> None:
        self._add(name, TensorProto.UINT8, shape, self._random.bytes(int(np.prod(shape))))

    def add_floats(self, name: str, shape: tuple[int, ...], scale: float) -> None:
        values = np.abs(self._random.standard_normal(shape)) if "scale" in name else self._random.standard_normal(shape)
        self._add(name, TensorProto.FLOAT, shape, (scale * values).astype(np.float32).tobytes())

    def share(self, name: str, other: str, shape: tuple[int, ...]) -> None:
        self.locations[name] = self.locations[other]._replace(shape=shape)

    def _add(self, name: str, kind: int, shape: tuple[int, ...], content: bytes) -> None:
        with self._path.open("ab") as file:
            self.locations[name] = TensorLocation(WEIGHTS_FILE, file.tell(), len(content), kind, shape)
            file.write(content)


def write_weights(directory: Path, hidden_size: int, experts: Experts) -> dict[str, TensorLocation]:
    """Write the tensors of both forms; the wide ones are the bytes of the others, in other shapes."""
    file, count, size = WeightsFile(directory), experts.num_experts, experts.intermediate_size
    assert all(number % BLOCK == 0 for number in (hidden_size, size)), "no tile and no block is padded"
    file.add_floats("mlp.router.weight", (count, hidden_size), hidden_size**-0.5)
    for name, outputs, inputs, wide in (
        ("fc", 2 * size, hidden_size, (count * 2 * size, hidden_size)),
        ("proj", hidden_size, size, (hidden_size, count * size)),
    ):
        file.add_codes(f"mlp.{name}.weight_int8_tiles", (count, outputs // TILE, inputs // BLOCK, 8, TILE, 4))
        file.add_floats(f"mlp.{name}.weight_scale_tiles", (count, outputs // TILE, inputs // BLOCK, TILE), 1e-3)
        tiles = wide[0] // TILE, wide[1] // BLOCK
        file.share(f"mlp.wide_{name}.weight_int8_tiles", f"mlp.{name}.weight_int8_tiles", (*tiles, 8, TILE, 4))
        file.share(f"mlp.wide_{name}.weight_scale_tiles", f"mlp.{name}.weight_scale_tiles", (*tiles, TILE))
    return file.locations


def open_layer(
    directory: Path,
    operators: NativeOperators,
    locations: dict[str, TensorLocation],
    hidden_size: int,
    experts: Experts,
) -> onnxruntime.InferenceSession:
    graph = OnnxGraph()
    x = graph.input("x", TensorProto.FLOAT, ["T", hidden_size])
    linear = Linear(graph, locations, operators)
    y = ExpertLayer(graph, linear, operators, "mlp", hidden_size, experts).emit(x)
    graph.output(y, "y", TensorProto.FLOAT, ["T", hidden_size])
    path = directory / f"{type(operators).__name__}.onnx"
    path.write_bytes(graph.model("experts", []).SerializeToString())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.register_custom_ops_library(str(find_library()))
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("experts", 128), ("per-token", 8), ("hidden-size", 2048), ("width", 768)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each number of rows")
    given = parser.parse_args()
    experts = Experts(given.experts, given.per_token, given.width, renormalises=True)
    random = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        locations = write_weights(directory, given.hidden_size, experts)
        forms: tuple[NativeOperators, ...] = (NATIVE, WideOperators())
        layers = [open_layer(directory, form, locations, given.hidden_size, experts) for form in forms]
        print("rows, milliseconds of the chosen and of all, median ratio of a turn, turns")
        for num_rows in (NUM_ROWS[-1], *NUM_ROWS):  # the first turns bring all pages in
            turns: list[tuple[float, ...]] = []
            started = time.perf_counter()
            while time.perf_counter() - started < given.seconds or len(turns) < 3:
                x = random.standard_normal((num_rows, given.hidden_size)).astype(np.float32)
                times = []
                for layer in layers:
                    began = time.perf_counter()
                    layer.run(None, {"x": x})
                    times.append(1000 * (time.perf_counter() - began))
                turns.append(tuple(times))
            chosen, wide = (statistics.median(column) for column in zip(*turns, strict=True))
            ratio = statistics.median(wide / chosen for chosen, wide in turns)
            print(f"{num_rows:4} {chosen:8.2f} {wide:8.2f} {ratio:6.2f} {len(turns):4}", flush=True)


if __name__ == "__main__":
    main()

"""Dividing a checkpoint takes what copying its files takes, whatever its size.

A clock says little on a busy machine, so the rule is counted: every byte of the source is read once, every byte of the
ranks is written once, and memory does not grow with the checkpoint. ``cost.py`` measures seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftline.checkpoints import huggingface
from draftline.checkpoints.ranks.convert import convert_for_ranks
from draftline.checkpoints.ranks.mapping import Mapping
from draftline.checkpoints.safetensors_file import tensor_locations
from tests.checkpoints.ranks.cost import write_large_checkpoint

ROOT = Path(__file__).resolve().parents[3]
SHAPE = {"hidden": 512, "ffn": 1792, "heads": 8, "kv_heads": 2, "vocab": 4096}


@pytest.mark.parametrize("mapping", [Mapping(), Mapping(2), Mapping(4, 2)])
def test_every_byte_is_read_once_and_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapping: Mapping
) -> None:
    source = write_large_checkpoint(tmp_path / "source", layers=2, **SHAPE)
    counted = {"read": 0, "written": 0}
    read_chunks, pwrite = huggingface.read_chunks, os.pwrite

    def counting_read(path, location):
        for chunk in read_chunks(path, location):
            counted["read"] += chunk.nbytes
            yield chunk

    def counting_write(descriptor, data, offset):
        written = pwrite(descriptor, data, offset)
        counted["written"] += written
        return written

    monkeypatch.setattr(huggingface, "read_chunks", counting_read)
    monkeypatch.setattr(os, "pwrite", counting_write)
    convert_for_ranks(source, tmp_path / "ranks", "bfloat16", mapping, None, lambda done, total: None)
    weights = [location for path in source.glob("*.safetensors") for location in tensor_locations(path).values()]
    assert counted["read"] == sum(location.num_bytes for location in weights)
    assert counted["written"] == sum(path.stat().st_size for path in (tmp_path / "ranks").glob("*.safetensors"))
    embedding = 2 * SHAPE["vocab"] * SHAPE["hidden"]
    shared = (mapping.tp_size - 1) * embedding  # and 1 MiB of norms, repeated key and value heads, and headers
    assert counted["written"] < counted["read"] + shared + (1 << 20)


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """A process that divides 16 times as much holds at most 8 MB more, of what would be 75 MB."""
    peaks = []
    for layers in (1, 16):
        folder = tmp_path / str(layers)
        shape = {**SHAPE, "vocab": 512}
        program = (
            "import sys; from pathlib import Path\n"
            "from draftline.checkpoints.ranks.convert import convert_for_ranks\n"
            "from draftline.checkpoints.ranks.mapping import Mapping\n"
            "from tests.resident_memory import peak_bytes\n"
            "source, target = map(Path, sys.argv[1:])\n"
            "convert_for_ranks(source, target, 'bfloat16', Mapping(2), None, lambda done, total: None)\n"
            "print(peak_bytes())\n"
        )
        source = write_large_checkpoint(folder, layers=layers, **shape)
        command = [sys.executable, "-c", program, str(source), str(tmp_path / f"ranks-{layers}")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 8_000_000

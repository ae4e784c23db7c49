from __future__ import annotations

from pathlib import Path

import pytest

from draftline.errors import ArtifactError, BuildError
from draftline.kernels import tuning
from draftline.kernels.configurations import default_configuration
from draftline.kernels.cost import Workload
from draftline.kernels.shape import KernelConfiguration, KernelShape
from draftline.kernels.tuning import load_tuned, main, tune, tuning_candidates, write_tuned

SHAPE = KernelShape(32, 8, 128, 16)


def test_the_fastest_over_all_workloads_is_taken() -> None:
    """Here what has three stages and 32 keys to a tile; eight warps do not run."""

    def measure(shape: KernelShape, configuration: KernelConfiguration, workload: Workload) -> float:
        if configuration.num_warps == 8:
            raise BuildError("measure", "runs", "not", "leave it out")
        return 10.0 - configuration.num_stages + configuration.tile_keys / 64 + workload.num_nodes

    found = tune(SHAPE, 90, measure)
    assert (found.num_stages, found.tile_keys, found.num_warps) == (3, 32, 4)
    assert found in tuning_candidates(SHAPE, 90)


def test_candidates_differ_and_begin_with_the_default() -> None:
    found = list(tuning_candidates(SHAPE, 80))
    assert found[0] == default_configuration(SHAPE, 80)
    assert len(set(found)) == len(found)


def test_nothing_that_runs_is_an_error() -> None:
    def measure(*arguments: object) -> float:
        raise BuildError("measure", "runs", "not", "leave it out")

    with pytest.raises(BuildError, match="a configuration runs on this GPU"):
        tune(SHAPE, 90, measure)


def test_what_was_tuned_is_loaded_for_the_same_kernels_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtifactError, match="the configuration was tuned; got no such file"):
        load_tuned(SHAPE, 90, tmp_path)
    tuned = KernelConfiguration(64, 32, 512, 8, 16, 64, 4, 3)
    write_tuned(SHAPE, 90, tuned, tmp_path)
    assert load_tuned(SHAPE, 90, tmp_path) == tuned
    monkeypatch.setattr(tuning, "source_hash", lambda: "another")
    with pytest.raises(ArtifactError, match="another version of them"):
        load_tuned(SHAPE, 90, tmp_path)


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    options = ["--heads", "32", "--kv-heads", "8", "--head-size", "128", "--cache", str(tmp_path)]
    assert main(options) == 1
    assert "this machine has an NVIDIA GPU; got none" in capsys.readouterr().err

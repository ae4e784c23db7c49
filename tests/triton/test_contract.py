"""The contract's tables against each other, Triton's protobuf and the committed configurations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from draftline.errors import RequestError
from draftline.triton.contract import ENSEMBLE_INPUTS, ENSEMBLE_OUTPUTS, ENSEMBLE_STEPS, GENERATION_INPUTS, MODELS
from draftline.triton.model_config import build_model_config
from draftline.triton.tensors import refuse_unsupported
from tests.triton.example import CHECKOUT, write_build

TENSORS = {model.name: {tensor.name: tensor for tensor in (*model.inputs, *model.outputs)} for model in MODELS}


def test_committed_configurations_are_what_the_package_stage_writes(tmp_path: Path) -> None:
    repository = write_build(tmp_path) / "model_repository"
    for model in MODELS:
        golden = CHECKOUT / "model_repo" / model.name / "config.pbtxt"
        written = (repository / model.name / "config.pbtxt").read_text("utf-8")
        assert written == golden.read_text("utf-8"), "run: python -m tests.triton.example"
        assert text_format.Parse(written, model_config_pb2.ModelConfig()).name == model.name
        assert (repository / model.name / "1").is_dir()


def test_paths_in_the_repository_are_relative(tmp_path: Path) -> None:
    repository = write_build(tmp_path) / "model_repository"
    for config in repository.glob("*/config.pbtxt"):
        assert str(tmp_path) not in config.read_text("utf-8")


def test_every_wire_joins_tensors_of_one_type() -> None:
    types = {tensor.name: tensor.datatype for tensor in (*ENSEMBLE_INPUTS, *ENSEMBLE_OUTPUTS)}
    for step in ENSEMBLE_STEPS:
        for model_name, wire in (*step.outputs.items(), *step.inputs.items()):
            datatype = TENSORS[step.model][model_name].datatype
            assert types.setdefault(wire, datatype) == datatype, (step.model, model_name, wire)


def test_every_client_input_reaches_a_model_and_only_two_are_required() -> None:
    wired = {wire for step in ENSEMBLE_STEPS for wire in step.inputs.values()}
    assert {tensor.name for tensor in ENSEMBLE_INPUTS} <= wired
    assert [tensor.name for tensor in ENSEMBLE_INPUTS if not tensor.optional] == ["text_input", "max_tokens"]


def test_no_model_has_a_queue_policy_or_a_second_instance() -> None:
    for model in MODELS:
        config = text_format.Parse(
            build_model_config(model, max_batch_size=4, parameters={}), model_config_pb2.ModelConfig()
        )
        assert not config.HasField("dynamic_batching")
        assert [group.count for group in config.instance_group] == ([] if model.steps else [1])
        assert config.model_transaction_policy.decoupled == (model.name == "tensorrt_llm")


@pytest.mark.parametrize("tensor", [tensor for tensor in GENERATION_INPUTS if tensor.neutral is not None])
def test_an_input_that_is_not_served_is_refused_by_name_unless_neutral(tensor) -> None:
    dtype = {"STRING": np.object_, "BOOL": np.bool_, "FP16": np.float16, "FP32": np.float32}.get(
        tensor.datatype, np.int64
    )
    used = {"STRING": b"json", "BOOL": True}.get(tensor.datatype, 7)
    for neutral in tensor.neutral:
        refuse_unsupported({tensor.name: np.array([[neutral]], dtype)}, [tensor])
    refuse_unsupported({tensor.name: np.zeros((1, 0), dtype)}, [tensor])
    refuse_unsupported({}, [tensor])
    client_name = {"len_penalty": "length_penalty"}.get(tensor.name, tensor.name)
    with pytest.raises(RequestError, match=f"^{client_name}: is not supported"):
        refuse_unsupported({tensor.name: np.array([[used]], dtype)}, [tensor])

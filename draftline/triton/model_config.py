"""A model's ``config.pbtxt`` from its contract, made through Triton's own protobuf."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from draftline.triton.contract import Model, Tensor


def build_model_config(model: Model, *, max_batch_size: int, parameters: Mapping[str, str]) -> str:
    """Return the text of ``config.pbtxt``.

    One CPU instance each: more than one after a decoupled model reorders streamed responses. Where Triton does not
    gather requests no queue policy: with any, the dynamic batcher of Triton 2.51 stalls for 500 ms, and an engine that
    returns at once needs no queue.
    """
    config: Any = model_config_pb2.ModelConfig(name=model.name, max_batch_size=max_batch_size if model.batches else 0)
    for tensor in model.inputs:
        _describe(config.input.add(), tensor)
        config.input[-1].optional = tensor.optional
        config.input[-1].allow_ragged_batch = tensor.ragged
    for tensor in model.outputs:
        _describe(config.output.add(), tensor)
    if model.steps:
        config.platform = "ensemble"
        for step in model.steps:
            config.ensemble_scheduling.step.add(
                model_name=step.model, model_version=-1, input_map=step.inputs, output_map=step.outputs
            )
    else:
        config.backend = model.backend
        config.instance_group.add(count=1, kind=model_config_pb2.ModelInstanceGroup.KIND_CPU)
    if model.dynamic_batching:  # at once, and without a limit: the backend has a queue of its own
        config.dynamic_batching.preferred_batch_size.append(max_batch_size)
        config.dynamic_batching.max_queue_delay_microseconds = 0
        config.dynamic_batching.default_queue_policy.max_queue_size = 0
    config.model_transaction_policy.decoupled = model.decoupled
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    text: str = text_format.MessageToString(config, as_utf8=True)
    assert text_format.Parse(text, model_config_pb2.ModelConfig()) == config
    return text


def _describe(described: Any, tensor: Tensor) -> None:
    described.name = tensor.name
    described.data_type = model_config_pb2.DataType.Value(f"TYPE_{tensor.datatype}")
    described.dims.extend(tensor.dims)
    if tensor.scalar:
        described.reshape.SetInParent()  # dims [1] reach the model as []

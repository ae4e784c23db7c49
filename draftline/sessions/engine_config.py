"""``engine/config.json``: what was built, by which version, with which limits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import draftline
from draftline.checkpoints.config import CheckpointConfig, Experts
from draftline.errors import ArtifactError
from draftline.speculation import EXACT, Acceptance, TreeShape

CONFIG_FILE, MODEL_FILE = "config.json", "model.onnx"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
FORMAT_VERSION = 9  # of the graphs' inputs and outputs and of this file
_AGAIN = "build the engine again"

PoolDtype = Literal["float32", "float16", "bfloat16", "float8_e4m3fn"]  # the last two on GPUs alone
PoolScales = tuple[tuple[float, float], ...]  # of a float8 pool: of the keys and of the values of each layer
PluginForm = Literal["runtime", "quick"]  # of TreeAttention: kernels that Python launches, or one inside the plan
EngineKernels = Literal["native", "onnxruntime", "plugin"]
DraftMethod = Literal["ngram", "draft_model", "eagle1", "eagle2", "eagle3", "medusa"]
METHODS_WITH_SESSIONS = ("draft_model", "eagle1", "eagle2", "eagle3")


@dataclass(frozen=True)
class DraftConfig:
    """One drafter of an engine. Fields a method has no use for are 0.

    - ``num_candidates``: the k of ``DraftResult.token_ids [R, k]`` and of ``StepResult.head_ids [R, heads, k]``.
    - ``max_position_embeddings``: positions the checkpoint was trained for; 0 = no limit of its own.
    - ``num_heads``: of Medusa, hence the greatest depth it drafts.
    - ``num_layers``, ``num_attention_heads``, ``num_key_value_heads``, ``head_size``: of the drafter's own layers.
    - ``num_parameters``: that a forward of the drafter reads; ``weights_dtype``: of its own matrices, "" without.
    - ``hidden_size``: columns of an EAGLE head's output, which later forwards are fed with.
    - ``feature_start``, ``feature_size``: the columns of the target's features that an EAGLE head reads.
    """

    method: DraftMethod
    num_candidates: int = 0
    max_position_embeddings: int = 0
    num_heads: int = 0
    num_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_size: int = 0
    hidden_size: int = 0
    feature_start: int = 0
    feature_size: int = 0
    num_parameters: int = 0
    weights_dtype: str = ""


@dataclass(frozen=True)
class PlanFacts:
    """One plan of an engine, ``file``: the hashes of its plugin's kernels, one for each window of its layers, and its
    profiles: by name, and in each by the dimension's name in the graph, the smallest, the best and the largest size.

    ``pool_dtype``: of its own pool. ``pool_scales``: of a float8 pool, none of others; rows are committed by them, and
    have the network's dtype until then.
    """

    file: str
    kernels_sha256: tuple[str, ...]
    profiles: Mapping[str, Mapping[str, tuple[int, int, int]]]
    pool_dtype: PoolDtype
    pool_scales: PoolScales = ()


@dataclass(frozen=True)
class TensorRtFacts:
    """How an engine of TensorRT was built, and what it asks of whoever loads it.

    ``vendor_version``: of the vendor's package, which alone reads its plans. ``plugin``: its form; a ``runtime`` one is
    registered before a plan is loaded, and ``plugin_sha256`` is of its contract. ``weights``: where they are; external
    ones are listed in ``weights.json``. ``plans``: the target's, then those of drafters with graphs.
    ``compute_capabilities``: 89 = 8.9. ``free_gpu_memory_fraction``: the share of the memory that is free after loading
    that the pools may take. ``cuda_graphs``: whether steps are replayed as graphs.
    """

    vendor_version: str
    dtype: str
    weights: Literal["embedded", "external"]
    compute_capabilities: tuple[int, ...]
    plugin: PluginForm
    plugin_sha256: str
    plans: tuple[PlanFacts, ...]
    free_gpu_memory_fraction: float
    cuda_graphs: bool


@dataclass(frozen=True)
class EngineConfig:
    """Limits are inclusive; ``num_threads`` 0 = one per physical core available.

    ``kernels``: whose operators the graphs are made of; ``plugin`` = TreeAttention is TensorRT's plugin.
    ``pool_dtype``: of keys and values in the target's pool; those of drafters on a GPU are in ``PlanFacts``.

    ``drafts`` in the order of the pipeline; ``tree`` is None exactly where there are none.

    ``captured_layers``: of an engine without drafts, whose features a trainer reads; None = nobody does.

    ``tensorrt``: of engines of tensorrt and tensorrt_rtx alone.
    """

    backend: str
    kernels: EngineKernels
    weights_dtype: str
    pool_dtype: PoolDtype
    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    num_threads: int
    block_size: int
    max_blocks: int
    prefix_cache: bool
    model: CheckpointConfig
    drafts: tuple[DraftConfig, ...] = ()
    tree: TreeShape | None = None
    acceptance: Acceptance = EXACT
    captured_layers: tuple[int, ...] | None = None
    tensorrt: TensorRtFacts | None = None

    @property
    def has_features(self) -> bool:
        """Whether a forward of the target puts out features."""
        return self.captured_layers is not None or any(draft.feature_size for draft in self.drafts)


def draft_model_file(index: int) -> str:
    """Name the graph of drafter ``index`` inside an engine."""
    return f"draft-{index}.onnx"


def write_engine_config(directory: Path, config: EngineConfig) -> None:
    """Write ``config.json``, the last file of an engine: it records the size of every other one."""
    sizes = {path.name: path.stat().st_size for path in sorted(directory.iterdir()) if path.name != CONFIG_FILE}
    document = {
        "format_version": FORMAT_VERSION,
        "draftline_version": draftline.__version__,
        "file_bytes": sizes,
        **dataclasses.asdict(config),
    }
    (directory / CONFIG_FILE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def load_engine_config(directory: Path) -> EngineConfig:
    """Read the config of an engine directory, and check that the files beside it are as long as they were built.

    Raises: ArtifactError if there is none, it is damaged, another version built the engine, or a file was cut.
    """
    path = directory / CONFIG_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(
            path, "an engine directory has a config.json", "none", "run `draftline run` first"
        ) from None
    except ValueError as error:
        raise ArtifactError(path, "must be JSON", str(error), _AGAIN) from None
    if not isinstance(document, dict):
        raise ArtifactError(path, "must be a JSON object", type(document).__name__, _AGAIN)
    versions = {"draftline_version": draftline.__version__, "format_version": FORMAT_VERSION}
    for key, expected in versions.items():
        found = document.pop(key, None)
        if found != expected:
            raise ArtifactError(
                f"{path}: {key}", f"this draftline serves engines with {expected}", found, "run `draftline run` again"
            )
    _check_keys(document, {"file_bytes", *_field_names(EngineConfig)}, path)
    on_gpu = document["tensorrt"] is not None
    allowed = {
        "kernels": ("plugin",) if on_gpu else ("native", "onnxruntime"),
        "pool_dtype": get_args(PoolDtype) if on_gpu else ("float32", "float16"),
    }
    for key, values in allowed.items():
        if document[key] not in values:
            raise ArtifactError(f"{path}: {key}", f"must be {' or '.join(values)}", document[key], _AGAIN)
    for name, num_bytes in document.pop("file_bytes").items():
        file = directory / name
        found = f"{file.stat().st_size} bytes" if file.is_file() else "no such file"
        if found != f"{num_bytes} bytes":
            raise ArtifactError(file, f"has the {num_bytes} bytes that were built", found, _AGAIN)
    if document["captured_layers"] is not None:
        document["captured_layers"] = tuple(document["captured_layers"])
    model = document.pop("model")
    _check_keys(model, _field_names(CheckpointConfig), f"{path}: model")
    for name in ("eos_token_ids", "full_layers"):
        model[name] = tuple(model[name])
    if model["experts"] is not None:
        _check_keys(model["experts"], _field_names(Experts), f"{path}: model.experts")
        model["experts"] = Experts(**model["experts"])
    speculation = _read_speculation(document, path)
    tensorrt = _read_tensorrt(document.pop("tensorrt"), path)
    return EngineConfig(**document, model=CheckpointConfig(**model), **speculation, tensorrt=tensorrt)


def _read_speculation(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """Take ``drafts``, ``tree`` and ``acceptance`` out of ``document``."""
    drafts, tree, acceptance = (document.pop(key) for key in ("drafts", "tree", "acceptance"))
    if not isinstance(drafts, list):
        raise ArtifactError(f"{path}: drafts", "must be a list", type(drafts).__name__, _AGAIN)
    for index, draft in enumerate(drafts):
        _check_keys(draft, _field_names(DraftConfig), f"{path}: drafts[{index}]")
    if tree is not None:
        _check_keys(tree, _field_names(TreeShape), f"{path}: tree")
        tree["choices"] = tuple(tuple(choice) for choice in tree["choices"])
    if (tree is None) != (not drafts):
        raise ArtifactError(f"{path}: tree", "is there exactly where drafts are", tree, _AGAIN)
    _check_keys(acceptance, _field_names(Acceptance), f"{path}: acceptance")
    return {
        "drafts": tuple(DraftConfig(**draft) for draft in drafts),
        "tree": None if tree is None else TreeShape(**tree),
        "acceptance": Acceptance(**acceptance),
    }


def _read_tensorrt(document: dict[str, Any] | None, path: Path) -> TensorRtFacts | None:
    if document is None:
        return None
    _check_keys(document, _field_names(TensorRtFacts), f"{path}: tensorrt")
    document["compute_capabilities"] = tuple(document["compute_capabilities"])
    plans = []
    for index, plan in enumerate(document.pop("plans")):
        _check_keys(plan, _field_names(PlanFacts), f"{path}: tensorrt.plans[{index}]")
        profiles = {
            name: {dimension: tuple(sizes) for dimension, sizes in profile.items()}
            for name, profile in plan.pop("profiles").items()
        }
        scales = tuple(map(tuple, plan.pop("pool_scales")))
        hashes = tuple(plan.pop("kernels_sha256"))
        plans.append(PlanFacts(**plan, kernels_sha256=hashes, profiles=profiles, pool_scales=scales))
    return TensorRtFacts(**document, plans=tuple(plans))


def _field_names(kind: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _check_keys(values: object, names: set[str], where: Path | str) -> None:
    if not isinstance(values, dict) or set(values) != names:
        keys = set(values) if isinstance(values, dict) else set()
        got = f"missing {sorted(names - keys)}, unexpected {sorted(keys - names)}"
        raise ArtifactError(where, "has the keys that were built", got, _AGAIN)

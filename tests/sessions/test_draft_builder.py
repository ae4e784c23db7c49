"""Engines with drafters: their files and config, drafts that do not fit, damaged ones, weights of every dtype."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftline.checkpoints.safetensors_file import tensor_locations
from draftline.checkpoints.trtllm import load_checkpoint_config
from draftline.errors import ArtifactError, BuildError
from draftline.generation import load_engine
from draftline.sessions.draft_builder import DraftSource, describe_drafts
from draftline.sessions.engine_config import DraftConfig, DraftMethod, load_engine_config, write_engine_config
from draftline.sessions.native_kernels import Kernels
from draftline.sessions.opening import open_draft_sessions, open_session
from draftline.speculation import Acceptance, TreeShape
from tests.sessions.tiny_engines import build_tiny_engine, convert_tiny_draft
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.tiny_drafts import write_tiny_eagle1, write_tiny_eagle3, write_tiny_medusa

CHAIN = TreeShape("chain", max_nodes=5, max_depth=4, top_k=1)
DYNAMIC = TreeShape("dynamic", max_nodes=16, max_depth=4, top_k=4)
STATIC = TreeShape("static", max_nodes=5, max_depth=2, top_k=1, choices=((0,), (6,), (0, 1), (0, 2)))
TYPICAL = Acceptance("typical", epsilon=0.1, alpha=0.2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Published checkpoints: a target and one draft of every method."""
    directory = tmp_path_factory.mktemp("drafts")
    target = write_tiny_checkpoint(directory / "target", num_layers=2)
    write_tiny_checkpoint(directory / "draft_model", num_layers=1, seed=4, max_position_embeddings=100)
    write_tiny_eagle1(directory / "eagle1", target)
    write_tiny_eagle3(directory / "eagle3", target, draft_vocab_size=100, max_position_embeddings=64)
    write_tiny_medusa(directory / "medusa", target, num_heads=5)
    return directory


def build(directory: Path, methods: list[DraftMethod], tree: TreeShape, destination: Path, **options: Any) -> Path:
    drafts = [(method, None if method == "ngram" else directory / method) for method in methods]
    destination.mkdir(parents=True, exist_ok=True)
    return build_tiny_engine(destination, directory / "target", drafts=drafts, tree=tree, **options)


@pytest.fixture(scope="module")
def engine(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    methods: list[DraftMethod] = ["ngram", "eagle1", "medusa", "draft_model", "eagle3"]
    destination = tmp_path_factory.mktemp("engine")
    return build(directory, methods, STATIC, destination, acceptance=TYPICAL, weights_dtype="int8")


def test_the_config_names_the_drafts(engine: Path) -> None:
    config = load_engine_config(engine)
    assert [draft.method for draft in config.drafts] == ["ngram", "eagle1", "medusa", "draft_model", "eagle3"]
    assert [draft.num_candidates for draft in config.drafts] == [0, 7, 7, 7, 7]
    assert [draft.max_position_embeddings for draft in config.drafts] == [0, 512, 0, 100, 64]
    assert [draft.num_heads for draft in config.drafts] == [0, 0, 5, 0, 0]
    assert (config.tree, config.acceptance) == (STATIC, TYPICAL)
    assert config.drafts[0] == DraftConfig("ngram")


@pytest.mark.parametrize("method", ["eagle1", "eagle3", "medusa", "draft_model"])
@pytest.mark.parametrize("kernels", ["native", "onnxruntime"])
def test_drafts_in_int8_beside_a_target_in_float32(
    directory: Path, tmp_path: Path, method: DraftMethod, kernels: Kernels
) -> None:
    """The target's tensors, borrowed ones too, stay in float32; the text is that of plain decoding."""
    rounded, exact = (
        build(directory, [method], CHAIN, tmp_path / name, draft_weights_dtype=dtype, kernels=kernels)
        for name, dtype in (("rounded", "int8"), ("exact", None))
    )
    assert load_engine_config(rounded).weights_dtype == "float32"
    assert [load_engine_config(path).drafts[0].weights_dtype for path in (rounded, exact)] == ["int8", "float32"]
    assert any("int8" in name for name in tensor_locations(rounded / "draft-0.safetensors"))
    assert (rounded / "rank0.safetensors").stat().st_size == (exact / "rank0.safetensors").stat().st_size
    with load_engine(rounded) as loaded:
        (drafted,) = loaded.generate([[5, 6, 7, 8]], max_tokens=24)
        (plain,) = loaded.generate([[5, 6, 7, 8]], max_tokens=24, speculate=False)
    assert drafted.token_ids == plain.token_ids
    assert drafted.metrics.speculation.num_drafted_tokens > 0


@pytest.mark.parametrize("method", ["eagle1", "eagle3", "draft_model"])
def test_the_parameters_of_a_draft_are_counted(directory: Path, tmp_path: Path, method: DraftMethod) -> None:
    """What a forward multiplies with: every matrix but the embedding, which is looked up, and borrowed matrices."""
    config = load_engine_config(build(directory, [method], DYNAMIC, tmp_path))
    tensors = tensor_locations(tmp_path / f"converted-{method}-{method}-float32" / "rank0.safetensors")
    matrices = {name: math.prod(t.shape) for name, t in tensors.items() if len(t.shape) == 2}
    expected = sum(size for name, size in matrices.items() if "embedding" not in name)
    borrowed = config.model.vocab_size * config.model.hidden_size if method == "eagle1" else 0
    assert config.drafts[0].num_parameters == expected + borrowed


def test_the_config_survives_the_disk(engine: Path, tmp_path: Path) -> None:
    config = load_engine_config(engine)
    for changed in (config, dataclasses.replace(config, drafts=(), tree=None, acceptance=Acceptance())):
        write_engine_config(tmp_path, changed)
        assert load_engine_config(tmp_path) == changed


@pytest.mark.parametrize("tree", [CHAIN, DYNAMIC], ids=["chain", "dynamic"])
def test_a_graph_has_the_candidates_that_the_tree_can_use(directory: Path, tmp_path: Path, tree: TreeShape) -> None:
    config = load_engine_config(build(directory, ["eagle1"], tree, tmp_path))
    assert config.drafts[0].num_candidates == tree.top_k


def test_every_draft_has_its_files(engine: Path) -> None:
    names = {path.name for path in engine.iterdir() if path.name.startswith("draft-")}
    graphs = {f"draft-{index}.onnx" for index in (1, 3, 4)}
    assert names == graphs | {f"draft-{index}.safetensors" for index in (1, 2, 3, 4)}


def test_float32_weights_are_linked(directory: Path, tmp_path: Path) -> None:
    built = build(directory, ["eagle3", "medusa"], DYNAMIC, tmp_path)
    for index, method in enumerate(("eagle3", "medusa")):
        stored = (built / f"draft-{index}-rank0.safetensors").stat()
        assert stored.st_ino == (tmp_path / f"converted-{method}-{method}-float32/rank0.safetensors").stat().st_ino


def test_half_precision_drafts_are_cast(directory: Path, tmp_path: Path) -> None:
    built = build(directory, ["eagle1", "draft_model"], DYNAMIC, tmp_path, dtype="bfloat16")
    config = load_engine_config(built)
    session = open_session(built, config)
    for draft in open_draft_sessions(built, config, session):
        assert draft is not None
        draft.close()
    session.close()


def spoil(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda d: d.pop("drafts"), "config.json"),
        (lambda d: d.update(drafts={}), "config.json: drafts: must be a list"),
        (lambda d: d.update(drafts=[]), "config.json: tree: is there exactly where drafts are"),
        (lambda d: d.update(tree=None), "config.json: tree: is there exactly where drafts are"),
        (lambda d: d["drafts"][1].pop("method"), r"config.json: drafts\[1\]"),
        (lambda d: d["drafts"].append(3), r"config.json: drafts\[5\]"),
        (lambda d: d["tree"].update(colour=1), "config.json: tree"),
        (lambda d: d.update(acceptance=[]), "config.json: acceptance"),
    ],
)
def test_damaged_configs(engine: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], where: str) -> None:
    write_engine_config(tmp_path, load_engine_config(engine))
    spoil(tmp_path / "config.json", change)
    with pytest.raises(ArtifactError, match=where):
        load_engine_config(tmp_path)


def test_a_config_of_another_draft(engine: Path) -> None:
    """Pools are made from config.json: the graph would read them as something else."""
    config = load_engine_config(engine)
    wrong = dataclasses.replace(config.drafts[1], head_size=8)
    config = dataclasses.replace(config, drafts=(config.drafts[0], wrong, *config.drafts[2:]))
    session = open_session(engine, config)
    with pytest.raises(ArtifactError, match=r"draft-1\.onnx: reads the pools of config\.json"):
        open_draft_sessions(engine, config, session)
    session.close()


@pytest.fixture(scope="module")
def destination(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the converted target, where converted drafts join it."""
    destination = tmp_path_factory.mktemp("converted")
    build_tiny_engine(destination, directory / "target")
    return destination


def describe(directory: Path, destination: Path, sources: list[tuple[DraftMethod, str | None]], **options: Any) -> None:
    target = destination / "converted-float32"
    converted = [
        DraftSource(
            method, name and convert_tiny_draft(destination, _own_method(name), directory / name, target, "float32")
        )
        for method, name in sources
    ]
    arguments = {"target": load_checkpoint_config(target), "tree": DYNAMIC, **options}
    describe_drafts(drafts=converted, weights_dtype="float32", kernels="onnxruntime", max_seq_len=64, **arguments)


def _own_method(name: str) -> DraftMethod:
    methods: dict[str, DraftMethod] = {"eagle1": "eagle1", "eagle3": "eagle3", "medusa": "medusa"}
    return methods.get(name, "draft_model")


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        ([("eagle1", "eagle1")], {"tree": None}, "tree: says how the drafts are used; got none"),
        ([], {}, "tree: stands beside a draft; got dynamic"),
        ([("ngram", None), ("ngram", None)], {}, "drafts: names a method once; got ngram, ngram"),
        ([("ngram", "eagle1")], {}, r"drafts\[0\]: ngram has no checkpoint"),
        ([("ngram", None), ("medusa", None)], {}, r"drafts\[1\]: ngram has no checkpoint, every other method has one"),
        ([("eagle3", "eagle1")], {}, r"drafts\[0\]: eagle3 is built from a head of eagle3; got eagle1"),
        ([("eagle2", "medusa")], {}, r"drafts\[0\]: eagle2 is built from a head of eagle1; got medusa"),
        (
            [("eagle3", "eagle3")],
            {"tree": dataclasses.replace(DYNAMIC, top_k=101)},
            r"drafts\[0\]: a node has at most as many children as the draft has tokens, 100; got 101",
        ),
    ],
)
def test_drafts_that_do_not_fit(
    directory: Path,
    destination: Path,
    sources: list[tuple[DraftMethod, str | None]],
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(BuildError, match=message):
        describe(directory, destination, sources, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 32}, r"drafts\[0\]: target_hidden_size: is the target's, 32; got 64"),
        ({"vocab_size": 500}, r"drafts\[0\]: vocab_size: is the target's, 500; got 320"),
        ({"num_hidden_layers": 1}, r"drafts\[0\]: captures layers of the target, which has 1; got 1"),
    ],
)
def test_heads_of_another_target(directory: Path, destination: Path, change: dict[str, Any], message: str) -> None:
    other = dataclasses.replace(load_checkpoint_config(destination / "converted-float32"), **change)
    with pytest.raises(BuildError, match=message):
        describe(directory, destination, [("eagle3", "eagle3")], target=other)

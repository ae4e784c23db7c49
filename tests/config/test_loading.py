"""Loading pipeline files: every problem at once, on its own line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from draftline.config import load_pipeline
from draftline.config.rules import RULES, Rule
from draftline.config.schema import BLOCKS, Pipeline
from draftline.config.tensorrt_llm import TENSORRT_LLM_RULES
from draftline.config.writing import pipeline_text
from draftline.errors import PipelineErrors

MINIMAL = "name: tiny\ntarget: {checkpoint: tiny}\n"


def problems(directory: Path, text: str | bytes, *overrides: str) -> list[str]:
    path = directory / "x.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(PipelineErrors) as caught:
        load_pipeline(path, overrides)
    return str(caught.value).replace(f"{directory}/", "").splitlines()


def load(directory: Path, text: str, *overrides: str) -> Pipeline:
    path = directory / "x.yaml"
    path.write_text(text)
    return load_pipeline(path, overrides)


def test_a_minimal_file_gets_the_defaults(tmp_path: Path) -> None:
    pipeline = load(tmp_path, MINIMAL)
    assert (pipeline.engine.backend, pipeline.engine.max_batch_size) == ("onnxruntime", 16)
    assert (pipeline.draft, pipeline.tree, pipeline.acceptance) == ((), None, None)


def test_a_draft_gets_a_tree(tmp_path: Path) -> None:
    pipeline = load(tmp_path, MINIMAL, "draft.method=ngram")
    assert pipeline.tree is not None
    assert pipeline.tree.max_nodes == 16
    assert pipeline.acceptance is not None
    assert pipeline.acceptance.rule == "exact"


def test_every_problem_is_reported_with_its_line(tmp_path: Path) -> None:
    text = (
        "# comment\nname: Bad Name\ntarget:\n  checkpoin: x\n  dtype: float17\nengine:\n"
        '  max_batch_size: "16"\n  max_batch_size: 3\n\n  num_threads: 1.5\nkv_cache: {block_size: 12}\n'
        "serve: {http_port: 8001}\nextra: {}\n"
    )
    found = problems(tmp_path, text, "engine.weights_dtype=int9", "nonsense", "engine.weights_dtype=int8")
    assert [line.split("; got")[0].rpartition(": ")[0] for line in found] == [
        "x.yaml:2: name",
        "x.yaml:3: target.checkpoint",
        "x.yaml:4: target.checkpoin",
        "x.yaml:5: target.dtype",
        "x.yaml:7: engine.max_batch_size",
        "x.yaml:8: engine.max_batch_size",
        "x.yaml:10: engine.num_threads",
        "x.yaml:11: kv_cache.block_size",
        "x.yaml:12: serve.grpc_port",
        "x.yaml:13: extra",
        "override 1: engine.weights_dtype",
        "override 2",
        "override 3: engine.weights_dtype",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "x.yaml:1: a pipeline file is a mapping; got an empty file; start from a file in pipelines/"),
        ("- a\n", "x.yaml:1: a pipeline file is a mapping; got a list; start from a file in pipelines/"),
        ("name: a\nb: [\n", "x.yaml:3: is YAML; got "),
        ("name: a\n--- \nname: b\n", "x.yaml:2: is YAML; got but found another document"),
        ("name: !!python/object:os.system a\n", "x.yaml:1: is YAML; got could not determine a constructor"),
        ("name: a\nname: b\n" + MINIMAL[11:], "x.yaml:2: name: a key stands once; got it again, after line 1"),
        (b"name: a\ntarget: \xff\n", "x.yaml:2: a pipeline file is UTF-8; got the byte 0xff; save it as UTF-8"),
        ("name: a\nx: \x07\n", "x.yaml:2: is YAML text; got the character '\\x07'; remove the character"),
        ("[" * 1500, "x.yaml: has blocks with keys, no deeper; got a deep nest; "),
        (MINIMAL + "serve:\n", "x.yaml:3: serve: is a block of keys; got null"),
        (MINIMAL + "engine: 3\n", "x.yaml:3: engine: is a block of keys; got 3"),
        (MINIMAL + "3: 4\n", "x.yaml:3: 3: a key is a word; got 3"),
        (MINIMAL + "engine: {backend: [a, b]}\n", "x.yaml:3: engine.backend: is onnxruntime | "),
        ("name: a\ntarget: &t {checkpoint: *t}\n", "x.yaml:2: target.checkpoint: is a non-empty text; got a block"),
        (
            MINIMAL + "engine: {max_num_tokens: true}\n",
            "x.yaml:3: engine.max_num_tokens: is an integer from 1 to 65536;",
        ),
    ],
)
def test_broken_files(tmp_path: Path, text: str | bytes, expected: str) -> None:
    assert problems(tmp_path, text)[0].startswith(expected)


def test_an_absent_file_and_a_folder(tmp_path: Path) -> None:
    for path, got in ((tmp_path / "absent.yaml", "no such file"), (tmp_path, "Is a directory")):
        with pytest.raises(PipelineErrors, match=got):
            load_pipeline(path)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["engine.max_seq_lem=3"], "override 1: engine.max_seq_lem: is an unknown key; got max_seq_lem; did you mean"),
        (["engine.max_seq_len=[1"], "override 1: engine.max_seq_len: the value is YAML; got [1"),
        (['engine.num_threads="2"'], 'override 1: engine.num_threads: is an integer from 0 to 1024; got "2"; write it'),
        (["draft.method=eagle"], "override 1: draft.method: is eagle1 | eagle2 | eagle3 | medusa"),
        (["target.checkpoint=1"], "override 1: target.checkpoint: is a non-empty text; got 1; put it in quotes"),
        (["name=\x07"], "override 1: name: the value is YAML"),
        (["a.b.c=1"], "override 1: reads block.key=value; got a.b.c=1"),
        (["=1"], "override 1: reads block.key=value; got =1"),
    ],
)
def test_broken_overrides(tmp_path: Path, overrides: list[str], expected: str) -> None:
    assert problems(tmp_path, MINIMAL, *overrides)[0].startswith(expected)


ELSEWHERE = TENSORRT_LLM_RULES  # tests/config/test_tensorrt_llm.py
RULES_OF_ONE_DRAFT = [rule for rule in RULES if "draft.earlier_methods" not in rule.fields and rule not in ELSEWHERE]
STATIC = ["draft.method=medusa", "draft.checkpoint=heads", "tree.kind=static"]
HALF = ["target.dtype=float16", "engine.weights_dtype=float16"]
RTX = ["engine.backend=tensorrt_rtx", "kv_cache.dtype=float16"]
TRAIN = ["train.checkpoint=new", "train.method=eagle1"]
BROKEN_RULES = [
    ["kv_cache.max_blocks=2"],
    ["engine.max_num_tokens=2"],
    ["serve.grpc_port=8000"],
    ["serve.metrics_port=8001"],
    ["draft.method=eagle3"],
    ["draft.method=ngram", "draft.weights_dtype=int8"],
    ["draft.method=medusa", "draft.checkpoint=heads", "draft.weights_dtype=int8", *HALF, *RTX],
    ["draft.method=medusa", "draft.checkpoint=heads", "draft.captured_layers=[1, 2]"],
    ["draft.method=eagle3", "draft.checkpoint=head", "draft.captured_layers=[2, 1]"],
    ["tree.kind=auto"],
    ["acceptance.rule=exact"],
    ["draft.method=ngram", "acceptance.epsilon=0.1"],
    ["draft.method=ngram", "acceptance.alpha=0.1"],
    STATIC,
    [*STATIC, "tree.choices=[[0], [1, 0]]"],
    [*STATIC, "tree.choices=mc_sim_7b_63", "tree.max_nodes=63"],
    ["draft.method=ngram", "tree.kind=static", "tree.choices=eagle_26"],
    ["draft.method=ngram", "tree.max_nodes=3"],
    ["draft.method=ngram", "tree.max_nodes=1000"],
    ["engine.backend=tensorrt", "target.dtype=float16", "kv_cache.dtype=float16"],
    ["engine.weights_dtype=int4", *RTX, "target.dtype=float16", "engine.weights=external"],
    ["engine.weights_dtype=float16"],
    ["engine.backend=tensorrt", *HALF],
    ["engine.weights=external"],
    ["engine.plugin=quick"],
    ["engine.cuda_graphs=false"],
    ["kv_cache.free_gpu_memory_fraction=0.5"],
    ["engine.compute_capabilities=[89]"],
    [*HALF, *RTX, "engine.compute_capabilities=[90]"],
    ["engine.weights_dtype=float8", "target.dtype=float16", *RTX, "engine.compute_capabilities=[86, 89]"],
    [*HALF, *RTX, "engine.compute_capabilities=[89, 80]"],
    [*TRAIN, "train.ttt_steps=3"],
    [*TRAIN, "train.ttt_growth=0.5"],
    [*TRAIN, "train.ttt_share=0.5"],
    [*TRAIN, "train.ttt_decay=0.5"],
    [*TRAIN, "train.draft_vocab_size=100"],
    [*TRAIN, "train.num_heads=2"],
    [*TRAIN, "train.own_lm_heads=true"],
    ["train.checkpoint=package:new", "train.method=eagle1"],
    [*TRAIN, "draft.method=medusa", "draft.checkpoint=new"],
]


@pytest.mark.parametrize(("rule", "overrides"), list(zip(RULES_OF_ONE_DRAFT, BROKEN_RULES, strict=True)))
def test_each_rule_across_fields_can_be_broken(tmp_path: Path, rule: Rule, overrides: list[str]) -> None:
    lines = problems(tmp_path, MINIMAL, *overrides)
    assert [f" {rule.fields[0]}: " in line for line in lines] == [True]


def test_a_rule_is_asked_although_another_field_of_its_block_is_wrong(tmp_path: Path) -> None:
    lines = problems(tmp_path, MINIMAL, "engine.max_num_tokens=2", "engine.backend=cuda")
    assert [line.split(": ")[1] for line in lines] == ["engine.max_num_tokens", "engine.backend"]


def test_the_schema_itself_keeps_the_rules() -> None:
    with pytest.raises(ValueError, match=r"serve\.grpc_port: differs"):
        Pipeline.model_validate({"name": "a", "target": {"checkpoint": "a"}, "serve": {"grpc_port": 8000}})


def test_an_unknown_block_of_an_override_is_told_at_the_override(tmp_path: Path) -> None:
    assert problems(tmp_path, MINIMAL, "engine.max_batch_size=2", "foo.bar=1")[0].startswith("override 2: foo: ")


def test_overrides_add_and_remove_blocks(tmp_path: Path) -> None:
    text = MINIMAL + "draft: {method: ngram}\n"
    assert load(tmp_path, text, "draft=null").draft == ()
    pipeline = load(tmp_path, text, "serve.host=0.0.0.0", "name=other")
    assert (pipeline.serve.host, pipeline.name) == ("0.0.0.0", "other")


def test_what_show_prints_loads_as_the_same_pipeline(tmp_path: Path) -> None:
    pipeline = load(tmp_path, MINIMAL, "draft.method=ngram", 'target.checkpoint="1: yes"')
    assert load(tmp_path, pipeline_text(pipeline)) == pipeline


KEYS = [f"{name}.{key}" for name, block in BLOCKS.items() for key in block.model_fields] + ["engine.x", "y.z", "name"]
NAMES = ["", "int8", "medusa", "ngram", "static", "typical", "eagle_26", "eagle3"]
WORDS = [*NAMES, 0.5, [], ["own"], [[0]], [[99]], [[0], [1, 0]]]
VALUES = st.one_of(st.integers(-2, 70000), st.booleans(), st.none(), st.sampled_from(WORDS))


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6), st.integers(0, 2))
def test_loading_and_the_schema_agree_on_what_is_valid(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, object], list_length: int
) -> None:
    nested: dict[str, dict[str, object] | object] = {"name": "tiny", "target": {"checkpoint": "tiny"}}
    for name, value in values.items():
        block, _, key = name.rpartition(".")
        target = nested if not block else nested.setdefault(block, {})
        target[key] = value  # type: ignore[index]
    if list_length and "draft" in nested:
        nested["draft"] = [nested["draft"], {"method": "ngram"}][:list_length]
    path = tmp_path_factory.getbasetemp() / "random.yaml"
    path.write_text(yaml.safe_dump(nested))
    try:
        expected = Pipeline.model_validate(nested)
    except ValueError:
        with pytest.raises(PipelineErrors) as caught:
            load_pipeline(path)
        assert all(line.startswith(f"{path}:") for line in str(caught.value).splitlines())
    else:
        assert load_pipeline(path) == expected

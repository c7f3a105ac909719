"""Odd models, odd numbers: an answer or a refusal that names a field, never another error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_afd.plan.errors import PlanError
from sglang_afd.plan.layouts import MAX_BATCH
from sglang_afd.plan.output import as_json
from sglang_afd.plan.profile import read_profile
from sglang_afd.plan.routing import Routing
from sglang_afd.plan.search import Question, search
from sglang_afd.plan.shape import SHIPPED, read_shape, shape_of, shipped
from sglang_afd.plan.step import Split, afd, colocated
from sglang_afd.plan.verdict import verdict
from sglang_afd.plan.workload import Workload

pytestmark = pytest.mark.unit

CONFIGS = {name: json.loads((SHIPPED / f"{name}.json").read_text()) for name in shipped()}
WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(-1, 5), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)


def _ask(config: Any, **changes: Any) -> dict[str, Any]:
    shape = shape_of(config)
    routing = Routing(shape.experts, shape.top_k)
    question: dict[str, Any] = {
        "shape": shape,
        "gpu": read_profile("h200"),
        "gpus": 4,
        "load": Workload(1024, 16),
        "routing": routing,
        "lanes": (1, 2),
    }
    answer = search(Question(**{**question, **changes}))
    return as_json(answer, verdict(answer), latencies=None, command=None)


@settings(deadline=None, max_examples=150)
@given(
    name=st.sampled_from(shipped()),
    data=st.data(),
)
def test_any_config_is_answered_or_refused_by_name(name: str, data: st.DataObject) -> None:
    config = json.loads(json.dumps(CONFIGS[name]))
    fields = config.get("text_config", config) if data.draw(st.booleans()) else config
    for key in data.draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=3)):
        fields[key] = data.draw(WRONG)
    try:
        found = _ask(config)
    except PlanError as error:
        assert str(error)
    else:
        json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("architectures", [None, [], "Qwen3MoeForCausalLM", [7]])
def test_a_config_without_a_known_architecture_is_refused(architectures: Any) -> None:
    with pytest.raises(PlanError, match="architectures"):
        shape_of({"architectures": architectures})


@pytest.mark.parametrize("content", ["", "[]", "{", "null", "\x00"])
def test_a_broken_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(PlanError, match=r"--model-path"):
        read_shape(str(file))


def test_a_tiny_model_has_a_bounded_batch() -> None:
    """Its cache is next to nothing, so memory alone would allow millions of requests."""
    config = {**CONFIGS["qwen3-30b-a3b"], "num_hidden_layers": 1, "hidden_size": 64}
    config |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    found = _ask(config, load=Workload(1))
    assert max(row["batch"] for row in found["layouts"]) <= MAX_BATCH


@settings(deadline=None, max_examples=30)
@given(
    context=st.integers(1, 10**8),
    output=st.integers(0, 10**8),
    width=st.integers(1, 64),
    gpus=st.integers(1, 40),
)
def test_any_workload_is_answered_or_refused(
    context: int, output: int, width: int, gpus: int
) -> None:
    load = Workload(context, output, width, float(width))
    try:
        found = _ask(CONFIGS["qwen3-30b-a3b-fp8"], load=load, gpus=gpus)
    except PlanError as error:
        assert "--gpus" in str(error)
    else:
        assert all(row["tokens_per_second_per_gpu"] > 0 for row in found["layouts"])


ECHO = {
    # measured on two H200: hidden size -> rows -> µs there and back, one bf16 copy
    2048: {1: 8.5, 16: 9.7, 64: 11.0, 128: 12.5, 256: 15.3, 512: 21.0},
    4096: {1: 9.7, 16: 10.5, 64: 12.6, 128: 15.1, 256: 20.9, 512: 32.2},
}


def _exchange(hidden: int, rows: int, transport: str) -> float:
    """µs of one layer's exchange at 1A1F, bf16 rows, the experts' time left out."""
    config = {**CONFIGS["qwen3-30b-a3b"], "hidden_size": hidden, "num_hidden_layers": 1}
    shape, gpu = shape_of(config), read_profile("h200")
    from sglang_afd.plan.kernels import expert_seconds
    from sglang_afd.plan.step import afd_stages

    routing = Routing(shape.experts, shape.top_k)
    split = Split(1, 1, lanes=1, batch=rows, transport=transport)
    stages = afd_stages(shape, gpu, routing, Workload(1), split)
    whole = float((stages.out + stages.ffn + stages.back)[0])
    return 1e6 * (whole - expert_seconds(shape, gpu, routing, rows, 1).max())


@pytest.mark.parametrize("hidden", ECHO)
def test_exchange_as_measured_over_nvlink(hidden: int) -> None:
    for rows, measured in ECHO[hidden].items():
        assert _exchange(hidden, rows, "nvlink") == pytest.approx(measured, rel=0.2)


def test_exchange_as_measured_over_deepep() -> None:
    assert _exchange(2048, 128, "deepep") == pytest.approx(48.8, rel=0.15)


def test_gloo_is_refused_for_it_has_no_time() -> None:
    with pytest.raises(PlanError, match="--transport"):
        _ask(CONFIGS["qwen3-30b-a3b"], transport="gloo")


@pytest.mark.parametrize("batch", [0, -1, float("nan"), float("inf"), 1e8])
def test_batches_are_refused_by_name(batch: float) -> None:
    shape, gpu = read_shape("qwen3-30b-a3b"), read_profile("h200")
    routing, load = Routing(128, 8), Workload(100)
    with pytest.raises(PlanError, match="--batch"):
        colocated(shape, gpu, routing, load, ranks=2, batch=batch)
    with pytest.raises(PlanError, match="--batch"):
        afd(shape, gpu, routing, load, Split(1, 1, lanes=1, batch=batch))


@settings(deadline=None, max_examples=20)
@given(batch=st.integers(1, 200), more=st.integers(1, 200), context=st.integers(1, 10**5))
def test_more_requests_or_context_never_make_a_step_shorter(
    batch: int, more: int, context: int
) -> None:
    shape, gpu, routing = read_shape("minimax-m2.5"), read_profile("h200"), Routing(256, 8)

    def seconds(batch: int, context: int) -> np.ndarray:
        load = Workload(context)
        split = afd(shape, gpu, routing, load, Split(3, 2, lanes=2, batch=batch))
        return np.array(
            [split.seconds, colocated(shape, gpu, routing, load, ranks=4, batch=batch).seconds]
        )

    now = seconds(batch, context)
    assert (seconds(batch + more, context) >= now).all()
    assert (seconds(batch, context + more) >= now).all()

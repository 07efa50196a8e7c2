"""How a vLLM server is started, and how its replies are read: no server, no clock."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from actors.engines.vllm import flags, wire
from actors.engines.vllm.check import write_zero_adapter
from actors.engines.vllm.flags import Needs, command, environment, lora_rank, missing, needs, parse_version
from broker.errors import ConfigError, EngineError
from broker.messages import Head


def head(run: str, *, rank: int, staleness: int, eval_slots: int = 0, fleet: str = "f", state: str = "running") -> Head:
    return Head(
        run=run, fleet=fleet, incarnation="i", epoch=1, learner="l", step=0, head=0, active=0, max_staleness=staleness,
        state=state, spec={"lora": {"rank": rank}, "fleet": {"eval_slots": eval_slots}},  # type: ignore[arg-type]
    )  # fmt: skip


def test_the_runs_of_a_fleet_decide_rank_and_slots_together() -> None:
    heads = [
        head("a", rank=8, staleness=2),
        head("b", rank=16, staleness=1, eval_slots=1),
        head("c", rank=64, staleness=9, fleet="other"),
        head("d", rank=64, staleness=9, state="finished"),
    ]
    assert needs(heads, "f", context=512) == Needs(rank=16, slots=4 + 4, context=512)
    assert needs(heads, "f", context=512, rank=32, slots=3) == Needs(rank=32, slots=3, context=512)
    assert needs([], "f", context=512) == Needs(flags.DEFAULT_RANK, flags.DEFAULT_SLOTS, 512)


def test_a_rank_is_rounded_up_to_what_vllm_takes_or_refused() -> None:
    assert [lora_rank(rank) for rank in (1, 2, 8, 9, 300, 512)] == [1, 8, 8, 16, 320, 512]
    with pytest.raises(ConfigError, match="at most 512"):
        lora_rank(513)


def test_a_server_is_started_for_what_is_needed_and_extra_flags_win() -> None:
    started = command(
        "python", Path("/m"), "name", needs=Needs(9, 5, 1024), version="0.32.0", dtype="float32", port=1234,
        extra=["--max-loras", "7"],
    )  # fmt: skip
    given = dict(itertools.pairwise(started))
    assert (given["--max-lora-rank"], given["--max-model-len"], given["--dtype"]) == ("16", "1024", "float32")
    assert (given["--host"], given["--port"], given["--logprobs-mode"]) == ("127.0.0.1", "1234", "processed_logprobs")
    assert started.index("6") < started.index("7"), "one more than the runs need"
    assert "--enable-scale-out" in started
    older = command("p", Path("/m"), "n", needs=Needs(8, 1, 1), version="0.17.1", dtype="bfloat16", port=1)
    assert "--enable-scale-out" not in older


def test_a_server_publishes_its_cache_where_it_can_and_nobody_says_otherwise() -> None:
    made = command(
        "p", Path("/m"), "n", needs=Needs(8, 1, 1), version="0.32.0", dtype="float32", port=1, events="ipc:///s/events"
    )
    config = json.loads(dict(itertools.pairwise(made))["--kv-events-config"])
    assert config == {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "ipc:///s/events"}
    assert flags.publishes_events("0.32.0", ["--enforce-eager"])
    assert not flags.publishes_events("0.31.1", [])
    for flag in ("--kv-events-config={}", "--data-parallel-size=2", "-dp", "--no-enable-prefix-caching"):
        assert not flags.publishes_events("0.33.0", ["--enforce-eager", flag]), flag


def test_the_environment_guards_the_api_and_sizes_the_cache_on_a_cpu_only() -> None:
    cpu = environment(key="k", cpu=True, threads=2, cache_bytes=3 * 2**30 + 1)
    assert (cpu["VLLM_API_KEY"], cpu["OMP_NUM_THREADS"], cpu["VLLM_CPU_KVCACHE_SPACE"]) == ("k", "2", "4")
    gpu = environment(key="k", cpu=False, threads=2, cache_bytes=1)
    assert gpu["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in gpu
    assert "OMP_NUM_THREADS" not in gpu


def test_versions_are_compared_by_number() -> None:
    assert parse_version("0.32.0+cpu") == (0, 32, 0)
    assert flags.refuse_version("0.9.2") is not None
    assert flags.refuse_version("0.11.0") is None
    assert flags.refuse_version("") is not None


def test_what_is_ours_and_was_not_loaded_is_foreign_and_what_is_others_is_not() -> None:
    on_engine = {"run-a-v000012-abcdef01": "", "run-probe-abcdef01": "", "farflung-base": "", "customer-v1": ""}
    assert flags.foreign(on_engine, {"run-a-v000012-abcdef01"}) == ["farflung-base", "run-probe-abcdef01"]
    assert flags.strangers(on_engine) == ["customer-v1"]


def test_nothing_is_missing_from_a_server_that_will_do() -> None:
    found = flags.Found("0.32.0", 512, True, None, 5, 0, 0.0)
    assert missing(found, Needs(8, 4, 512)) == []
    assert "--max-loras 7" in missing(flags.Found("0.32.0", 512, True, None, 6, 2, 0.0), Needs(8, 4, 512))[0]
    assert missing(flags.Found("0.32.0", 512, True, None, None, 2, 0.0), Needs(8, 4, 512)) == []


def test_counters_are_summed_over_their_labels_and_labels_are_found() -> None:
    text = '# HELP a b\na{engine="0"} 2.0\na{engine="1"} 3.5\nab{x="1"} 9.0\nplain 1.0\ninfo{x="7",y="z"} 1.0\n'
    assert wire.counter(text, "a") == 5.5
    assert wire.counter(text, "plain") == 1.0
    assert wire.counter(text, "none") is None
    assert wire.label(text, "info", "y") == "z"
    assert wire.label(text, "info", "none") is None


@pytest.mark.parametrize("answer", [None, [], {}, {"data": []}, {"data": [{"id": "x", "parent": "y"}]}, {"data": 3}])
def test_a_list_of_models_without_a_base_is_refused(answer: object) -> None:
    with pytest.raises(EngineError, match="cannot be read"):
        wire.served(answer)


def test_the_adapter_that_is_tried_fits_the_model_and_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    assert write_zero_adapter(tiny_model, 4, tmp_path / "check")
    weights = load_file(tmp_path / "check" / "adapter_model.safetensors")
    assert {name.rpartition("lora_")[2]: array.shape for name, array in weights.items()} == {
        "A.weight": (4, 64), "B.weight": (32, 4),
    }  # fmt: skip
    assert not any(array.any() for array in weights.values())
    assert not write_zero_adapter(tmp_path, 4, tmp_path / "none")

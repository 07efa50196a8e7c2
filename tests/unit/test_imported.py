"""An adapter from elsewhere: taken as it is, or refused with what to write instead."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from actors.engines.embedded import EmbeddedEngine
from broker.bus import Bus
from broker.errors import ConfigError
from broker.models import ModelFiles, resolve
from broker.registry import Registry
from broker.runspec import LoraSection, OptimizerSection
from broker.store import Store
from broker.trajectories import Group
from learner.imported import read_adapter
from learner.model import Policy
from tests.whole_run import whole_run

LORA = LoraSection(rank=4, alpha=8)


@pytest.fixture(scope="module")
def files(tiny_model: Path) -> ModelFiles:
    return resolve(str(tiny_model))


def trained(files: ModelFiles, directory: Path, **options: Any) -> tuple[Path, torch.nn.Module]:
    """What PEFT saves after a training run of its own."""
    base = AutoModelForCausalLM.from_pretrained(files.directory, dtype=torch.float32)
    plain = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    model = get_peft_model(base, LoraConfig(**{**plain, **options}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(directory)
    return directory, model


@pytest.fixture(scope="module")
def saved(files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    return trained(files, tmp_path_factory.mktemp("peft") / "adapter")


def test_an_adapter_that_peft_saved_computes_the_same_as_the_runs_first_version(
    files: ModelFiles, saved: tuple[Path, torch.nn.Module]
) -> None:
    directory, model = saved
    policy = Policy(
        files.directory, model_name="tiny", lora=LORA, optimizer=OptimizerSection(), temperature=1.0, threads=1
    )
    blob = read_adapter(directory, LORA, files)
    prompt = np.arange(3, 30, dtype=np.int32)
    with torch.no_grad():
        expected = model(torch.tensor(prompt[None], dtype=torch.int64)).logits[0, -1].log_softmax(-1).numpy()
    np.testing.assert_allclose(policy.next_logprobs([prompt], blob)[0], expected, atol=1e-5)
    policy.load_adapter_bytes(blob)
    assert policy.next_logprobs([prompt], policy.adapter_bytes())[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_taken_at_its_value(
    files: ModelFiles, saved: tuple[Path, torch.nn.Module], tmp_path: Path, dtype: torch.dtype
) -> None:
    half = shutil.copytree(saved[0], tmp_path / "half")
    path = half / "adapter_model.safetensors"
    rounded = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    save_file(rounded, path)
    blob = read_adapter(half, LORA, files)
    from safetensors.torch import load

    for name, tensor in load(blob).items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, rounded[name].float())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"use_rslora": True}, "use_rslora"),
        ({"bias": "all"}, "bias='all'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"peft_type": "IA3"}, "expected a LoRA adapter, found IA3"),
        ({"r": 16}, "it has rank 16, lora.rank is 4; write 16"),
        ({"lora_alpha": 32}, "it has alpha 32, lora.alpha is 8; write 32"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused_with_its_reason(
    files: ModelFiles, saved: tuple[Path, torch.nn.Module], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    copy = shutil.copytree(saved[0], tmp_path / "copy")
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError) as refused:
        read_adapter(copy, LORA, files)
    assert said in str(refused.value)
    assert str(copy) in str(refused.value)


def test_targets_that_differ_are_named_as_the_configuration_wants_them(files: ModelFiles, tmp_path: Path) -> None:
    directory, _ = trained(files, tmp_path / "some", target_modules=["q_proj", "v_proj"])
    with pytest.raises(ConfigError, match=r'Write targets = \["q_proj", "v_proj"\]'):
        read_adapter(directory, LORA, files)
    assert read_adapter(directory, LoraSection(rank=4, alpha=8, targets=["v_proj", "q_proj"]), files)


def test_an_adapter_of_another_model_is_refused(
    files: ModelFiles, saved: tuple[Path, torch.nn.Module], tmp_path: Path
) -> None:
    from tests.tiny import build_tiny_model

    other = resolve(str(build_tiny_model(tmp_path / "other", hidden=64)))
    with pytest.raises(ConfigError, match="was it trained on another model"):
        read_adapter(saved[0], LORA, other)
    shallow = resolve(str(build_tiny_model(tmp_path / "shallow", layers=1)))
    with pytest.raises(ConfigError, match="no linear layer of the base model"):
        read_adapter(saved[0], LORA, shallow)


def test_what_is_no_adapter_directory_is_refused(
    files: ModelFiles, saved: tuple[Path, torch.nn.Module], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="save_pretrained"):
        read_adapter(tmp_path, LORA, files)
    copy = shutil.copytree(saved[0], tmp_path / "copy")
    weights = copy / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(ConfigError, match="damaged"):
        read_adapter(copy, LORA, files)
    weights.unlink()
    with pytest.raises(ConfigError, match="safe_serialization"):
        read_adapter(copy, LORA, files)


@pytest.mark.servers
async def test_a_run_that_begins_with_an_adapter_never_samples_from_the_base(
    saved: tuple[Path, torch.nn.Module], bus: Bus, registry: Registry, store: Store, tmp_path: Path, tiny_model: Path
) -> None:
    async with whole_run(bus, registry, store, tmp_path, tiny_model) as fleet:
        fleet.sections["lora"] = {"rank": 4, "alpha": 8}
        learner = await fleet.start(EmbeddedEngine, adapter=saved[0])
        assert (await learner.run()).steps == 6
        found = await registry.head(fleet.name)
        assert found is not None
        assert (found[0].first, found[0].head, found[0].origin) == (1, 7, "adapter adapter")
        groups = [key for key, _ in await store.list(f"runs/{fleet.name}/") if "/groups/" in key]
        versions = {Group.from_blob(await store.read(key)).version for key in groups}
        assert min(versions) == 1
        assert len(versions) > 1

"""The tokenizer and chat template give what transformers gives, without it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from broker.chat import ChatTokenizer, prompt_ids, with_system_prompt
from broker.errors import ModelError, TaskSourceError
from tests.tiny import CHATML, EOS

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is 2 + 3?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Grüße, 你好 \n\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b <|im_end|> c"},
        {"role": "user", "content": "<tags> & 'quotes'"},
    ],
]


@pytest.fixture
def tiny(tiny_model: Path) -> Path:
    return tiny_model


def agrees_with_transformers(directory: Path) -> None:
    from transformers import AutoTokenizer

    ours = ChatTokenizer.from_directory(directory)
    theirs = AutoTokenizer.from_pretrained(directory)
    for messages in CONVERSATIONS:
        for add_generation_prompt in (True, False):
            text = ours.render(messages, add_generation_prompt=add_generation_prompt)
            expected: Any = theirs.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, return_dict=False
            )
            assert ours.encode(text) == list(expected)
            assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)


def test_rendering_and_encoding_agree_with_transformers_on_a_tiny_model(tiny: Path) -> None:
    agrees_with_transformers(tiny)


@pytest.mark.slow
def test_rendering_and_encoding_agree_with_transformers_on_smollm2() -> None:
    from broker.models import PACKAGED, resolve

    directory = resolve(PACKAGED).directory
    agrees_with_transformers(directory)
    assert ChatTokenizer.from_directory(directory).eos_ids == (2,)


def with_template(tiny: Path, target: Path, template: str | None, **files: Any) -> ChatTokenizer:
    target.mkdir(exist_ok=True)
    (target / "tokenizer.json").write_text((tiny / "tokenizer.json").read_text())
    config = json.loads((tiny / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (target / "tokenizer_config.json").write_text(json.dumps(config | files.pop("config", {})))
    for name, content in files.items():
        (target / f"{name}.json").write_text(json.dumps(content))
    if template is not None:
        (target / "chat_template.jinja").write_text(template)
    return ChatTokenizer.from_directory(target)


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}|{{ eos_token }}|{{ strftime_now('%Y')|length }}",
        "{% for m in messages %}\n    {% if loop.last %}\n{{ m | tojson }}\n    {% endif %}\n{% endfor %}\n",
        "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
        "{% generation %}{{ messages[0]['content'] }}{% endgeneration %}{% if tools %}tools{% endif %}",
    ],
)
def test_template_features_agree_with_transformers(tiny: Path, tmp_path: Path, template: str) -> None:
    from transformers import AutoTokenizer

    ours = with_template(tiny, tmp_path / "m", template, config={"bos_token": {"content": "<|endoftext|>"}})
    theirs = AutoTokenizer.from_pretrained(tiny, bos_token="<|endoftext|>")
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "<é>"},
        {"role": "assistant", "content": "b", "tool_calls": None},
    ]
    expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert ours.render(messages) == expected


def test_a_template_is_found_in_each_place_models_keep_it(tiny: Path, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    assert with_template(tiny, tmp_path / "a", CHATML).has_template
    assert with_template(tiny, tmp_path / "b", None, config={"chat_template": CHATML}).has_template
    assert with_template(tiny, tmp_path / "c", None, chat_template={"chat_template": CHATML}).has_template
    by_name = with_template(tiny, tmp_path / "d", None, config={"chat_template": named})
    assert by_name.render([{"role": "user", "content": "x"}]).startswith("<|im_start|>")


def test_every_token_that_ends_a_reply_is_known(tiny: Path, tmp_path: Path) -> None:
    assert ChatTokenizer.from_directory(tiny).eos_ids == (EOS,)
    several = with_template(
        tiny,
        tmp_path / "several",
        CHATML.replace("<|im_end|>", "<|im_start|>"),
        config={"eos_token": "<|im_end|>"},
        generation_config={"eos_token_id": [0, 2]},
    )
    assert several.eos_ids == (0, 2, 1), "config, then tokenizer, then the token the template closes a turn with"


def test_a_model_without_a_chat_template_still_completes_strings(tiny: Path, tmp_path: Path) -> None:
    tokenizer = with_template(tiny, tmp_path / "m", None)
    assert not tokenizer.has_template
    assert tokenizer.decode(prompt_ids(tokenizer, "Once")) == "Once"
    with pytest.raises(ModelError, match=r"no chat template.*chat_template\.jinja.*plain strings"):
        tokenizer.render([{"role": "user", "content": "x"}])


def test_messages_that_the_template_refuses_are_told_with_their_roles(tiny: Path, tmp_path: Path) -> None:
    tokenizer = with_template(tiny, tmp_path / "m", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ModelError, match=r"\['user', 'user'\].*roles must alternate"):
        tokenizer.render([{"role": "user", "content": "x"}] * 2)


def test_a_template_cannot_reach_out_of_its_sandbox(tiny: Path, tmp_path: Path) -> None:
    tokenizer = with_template(tiny, tmp_path / "m", "{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ModelError, match=r"unsafe|undefined"):
        tokenizer.render([{"role": "user", "content": "x"}])


def test_a_directory_without_a_tokenizer_says_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="save_pretrained"):
        ChatTokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="no tokenizer that"):
        ChatTokenizer.from_directory(tmp_path)


def test_a_system_prompt_goes_first_unless_there_is_one() -> None:
    user, own = {"role": "user", "content": "x"}, {"role": "system", "content": "own"}
    assert with_system_prompt([user], "be brief") == [{"role": "system", "content": "be brief"}, user]
    assert with_system_prompt([own, user], "be brief") == [own, user]
    assert with_system_prompt("text", "") == "text"
    with pytest.raises(TaskSourceError, match="system_prompt"):
        with_system_prompt("text", "be brief")


def test_tokenizing_loads_neither_torch_nor_transformers(tiny: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from broker.chat import ChatTokenizer\n"
        "assert 'jinja2' not in sys.modules and 'tokenizers' not in sys.modules\n"
        f"tokenizer = ChatTokenizer.from_directory(Path({str(tiny)!r}))\n"
        "tokenizer.encode(tokenizer.render([{'role': 'user', 'content': 'x'}]))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])

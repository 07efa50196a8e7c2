"""User code by name: what is found, and what people are told when it is not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from broker.code import load_object, source_hash
from broker.errors import UserCodeError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_is_found_under_the_first_root_that_has_it(tmp_path: Path) -> None:
    write(tmp_path / "two" / "code.py", "NAME = 'two'\n")
    write(tmp_path / "three" / "code.py", "NAME = 'three'\n")
    roots = [tmp_path / "one", tmp_path / "two", tmp_path / "three"]
    assert load_object("code.py:NAME", roots=roots) == "two"


def test_a_file_is_found_under_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "sub" / "code.py", "NAME = 'here'\n")
    monkeypatch.chdir(tmp_path)
    assert load_object("sub/code.py:NAME") == "here"


def test_files_of_one_name_do_not_meet(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a" / "code.py", "VALUE = 1\n"), write(tmp_path / "b" / "code.py", "VALUE = 2\n")
    assert (load_object(f"{first}:VALUE"), load_object(f"{second}:VALUE")) == (1, 2)


def test_a_file_is_imported_once_until_it_changes(tmp_path: Path) -> None:
    path = write(tmp_path / "code.py", "class One: ...\nclass Two: ...\n")
    one: Any = load_object(f"{path}:One")
    assert load_object(f"{path}:One") is one
    assert one.__module__ == load_object(f"{path}:Two").__module__
    path.write_text("class One: changed = True\n")
    assert load_object(f"{path}:One") is not one


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path / "neighbour_of_code.py", "VALUE = 7\n")
    path = write(tmp_path / "code.py", "from neighbour_of_code import VALUE\n")
    before = list(sys.path)
    assert load_object(f"{path}:VALUE") == 7
    assert sys.path == before


def test_a_module_is_found_by_its_name_and_under_the_roots(tmp_path: Path) -> None:
    import json

    write(tmp_path / "user_package_x" / "rewards.py", "VALUE = 3\n")
    assert load_object("json:dumps") is json.dumps
    assert load_object("user_package_x.rewards:VALUE", roots=[tmp_path]) == 3


@pytest.mark.parametrize("spec", ["code.py", "code.py:", ":name", "package.module", "code.py:two words"])
def test_a_spec_of_another_form_is_refused_with_the_form_it_should_have(spec: str) -> None:
    with pytest.raises(UserCodeError, match=r"path/to/file\.py:name or package\.module:name"):
        load_object(spec)


def test_a_missing_file_names_the_places_looked_at(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match=f"no such file.*{tmp_path}/absent.py"):
        load_object("absent.py:name", roots=[tmp_path])


def test_a_missing_name_lists_the_names_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "code.py", "def score(): ...\n")
    with pytest.raises(UserCodeError, match="has no 'reward'; it has score"):
        load_object(f"{path}:reward")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("x = 1\nraise ValueError('boom')\n", r"code\.py:2: ValueError: boom"),
        ("\n\ndef broken(:\n", r"code\.py:3: SyntaxError"),
        ("import no_such_package_x\n", r"code\.py:1: ModuleNotFoundError.*no_such_package_x"),
    ],
)
def test_an_import_that_fails_names_the_line_in_the_users_file(tmp_path: Path, source: str, told: str) -> None:
    path = write(tmp_path / "code.py", source)
    with pytest.raises(UserCodeError, match=told):
        load_object(f"{path}:x")


def test_a_missing_module_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match="no module 'no_such_package_x'"):
        load_object("no_such_package_x.rewards:score", roots=[tmp_path])


def test_the_source_hash_is_the_contents_and_nothing_else(tmp_path: Path) -> None:
    one = write(tmp_path / "a" / "code.py", "VALUE = 1\n")
    two = write(tmp_path / "b" / "other.py", "VALUE = 1\n")
    assert source_hash(f"{one}:VALUE") == source_hash("other.py:VALUE", [tmp_path / "b"])
    assert len(source_hash(f"{one}:VALUE")) == 16
    two.write_text("VALUE = 2\n")
    assert source_hash(f"{one}:VALUE") != source_hash(f"{two}:VALUE")
    assert source_hash("json.decoder:JSONDecoder")
    with pytest.raises(UserCodeError, match="no source file"):
        source_hash("no_such_package_x:name")

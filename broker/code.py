"""The user's code by name: rewards, environments and task sources.

A name is `path/to/file.py:name` or `package.module:name`. Nothing on the wire or in the store is ever executed: a
component runs only what lies in the folders its owner gave it, and compares source hashes with the learner's.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from broker.errors import UserCodeError

HASH_LENGTH = 16
"""Hex digits of a source hash: 64 bits, enough to tell apart what people write."""

_importing = threading.RLock()
"""Held while `sys.path` is changed for an import."""


def load_object(spec: str, *, roots: Sequence[Path] = ()) -> object:
    """Import what `spec` names. Files are looked for under `roots`, in order, then under the current folder.

    A file is imported once per content, and its folder is importable while that happens. Raises UserCodeError when
    the file or module is missing, fails to import (with the line), or lacks the name.
    """
    place, name = _split(spec)
    if _is_file(place):
        path = _find_file(spec, place, roots)
        module = _import_file(spec, path)
        origin = str(path)
    else:
        module = _import_module(spec, place, roots)
        origin = f"module {place}"
    try:
        found: object = getattr(module, name)
    except AttributeError:
        names = sorted(key for key, value in vars(module).items() if not key.startswith("_") and callable(value))
        raise UserCodeError(
            f"{spec}: {origin} has no {name!r}; it has {', '.join(names) or 'no functions or classes'}. "
            "Write one of those after the colon"
        ) from None
    return found


def source_hash(spec: str, roots: Sequence[Path] = ()) -> str:
    """The first 16 hex digits of the sha256 of the source file that `spec` names. Raises UserCodeError."""
    place, _ = _split(spec)
    path = _find_file(spec, place, roots) if _is_file(place) else _find_module(spec, place, roots)
    return _digest(path)


def _split(spec: str) -> tuple[str, str]:
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise UserCodeError(
            f"expected path/to/file.py:name or package.module:name, got {spec!r}. "
            "Write the file or module, a colon, and the name of a function or class in it"
        )
    return place, name


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place or "\\" in place


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:HASH_LENGTH]


def _find_file(spec: str, place: str, roots: Sequence[Path]) -> Path:
    tried = [base / Path(place).expanduser() for base in (*roots, Path.cwd())]
    for path in tried:
        if path.is_file():
            return path.resolve()
    where = ", ".join(dict.fromkeys(str(path) for path in tried))
    raise UserCodeError(f"{spec}: no such file; looked for {where}. Give a path relative to the configuration's folder")


@contextmanager
def _importable(folders: Sequence[Path]) -> Iterator[None]:
    """Put `folders` first on `sys.path` for as long as the context lasts."""
    added = [str(folder) for folder in folders]
    with _importing:
        sys.path[:0] = added
        importlib.invalidate_caches()
        try:
            yield
        finally:
            for folder in added:
                if folder in sys.path:
                    sys.path.remove(folder)


def _import_file(spec: str, path: Path) -> ModuleType:
    place = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"farflung_user_{path.stem}_{place}_{_digest(path)}"
    with _importable([path.parent]):
        if name in sys.modules:
            return sys.modules[name]
        module_spec = importlib.util.spec_from_file_location(name, path)
        if module_spec is None or module_spec.loader is None:
            raise UserCodeError(f"{spec}: {path} is no Python file; its name must end in .py")
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[name] = module
        try:
            module_spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise UserCodeError(f"{spec}: {_where(error, path)}: {type(error).__name__}: {error}") from error
        return module


def _import_module(spec: str, name: str, roots: Sequence[Path]) -> ModuleType:
    with _importable(roots):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise UserCodeError(f"{spec}: importing {name} failed: {error}") from error
            raise UserCodeError(
                f"{spec}: no module {error.name!r} is installed or lies under {_listed(roots)}. "
                "Install it, or name the file: path/to/file.py:name"
            ) from None
        except Exception as error:
            raise UserCodeError(f"{spec}: {_where(error, None)}: {type(error).__name__}: {error}") from error


def _find_module(spec: str, name: str, roots: Sequence[Path]) -> Path:
    with _importable(roots):
        try:
            found = importlib.util.find_spec(name)
        except Exception as error:
            raise UserCodeError(f"{spec}: importing {name} failed: {type(error).__name__}: {error}") from error
    if found is None or found.origin is None or not Path(found.origin).is_file():
        raise UserCodeError(
            f"{spec}: no source file of a module {name!r} is installed or lies under {_listed(roots)}. "
            "Install it, or name the file: path/to/file.py:name"
        )
    return Path(found.origin)


def _listed(roots: Sequence[Path]) -> str:
    return ", ".join(str(root) for root in roots) or "the current folder"


def _where(error: Exception, path: Path | None) -> str:
    """`file:line` of the innermost frame in `path` (any user's file if None), or of a syntax error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    in_file = [frame for frame in frames if path is not None and frame.filename == str(path)] or frames
    return f"{in_file[-1].filename}:{in_file[-1].lineno}" if in_file else str(path or "the import")

"""A digest of what the module is compiled from. setup.py loads this file alone, without torch."""

import hashlib
from pathlib import Path

_SUFFIXES = {".cpp", ".cu", ".cuh", ".h"}


def source_hash(root: Path) -> str:
    """The digest of the sources of a tree: ``csrc/``, and ``setup.py`` for its compiler flags."""
    sources = [
        path
        for path in root.joinpath("csrc").rglob("*")
        # The lock of an editor, .#norm.cpp, is a link to nowhere.
        if (path.suffix in _SUFFIXES and not path.name.startswith("."))
        # Named like the standard headers that they stand in for.
        or (path.parent.name == "rtc" and path.name.isidentifier())
    ]
    digest = hashlib.sha256()
    for path in sorted([root / "setup.py", *sources]):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\n{len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]

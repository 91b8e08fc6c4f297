"""What a compiled kernel says of itself: registers, stack and shared memory, read from a cubin.

A cubin is an ELF file. Of its section `.nv.info`, entries 0x2f and 0x11 hold pairs of a symbol's
number and its registers, or the bytes of its stack frame, as `cuobjdump -elf` shows them.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_REGISTERS, _FRAME_BYTES = 0x2F, 0x11
_HAS_VALUES = 4  # the form of an entry that holds more than 16 bits


class Facts(NamedTuple):
    """What a kernel takes."""

    registers: int  # of a thread
    stack_bytes: int  # of a thread; registers that are spilled lie there
    shared_bytes: int  # of a CTA, beside what its launch asks for; some is CUDA's own


def facts_of(symbol: str, code: bytes) -> Facts | None:
    """The facts of the kernel of that mangled name; None for PTX, which has none yet."""
    if not code.startswith(b"\x7fELF"):
        return None
    sections = _sections(code)
    number = _symbols(code, sections).index(symbol)
    values = _values(_content(code, sections[".nv.info"]))
    _, shared_bytes = sections.get(f".nv.shared.{symbol}", (0, 0))
    return Facts(values[_REGISTERS, number], values.get((_FRAME_BYTES, number), 0), shared_bytes)


def _sections(code: bytes) -> dict[str, tuple[int, int]]:
    """Offset and size of each section."""
    (table,) = struct.unpack_from("<Q", code, 0x28)
    entry_bytes, count, names = struct.unpack_from("<HHH", code, 0x3A)
    entries = [
        struct.unpack_from(
            "<IIQQQQ", code, table + i * entry_bytes
        )  # name first, offset, size last
        for i in range(count)
    ]
    return {_text(code, entries[names][4] + entry[0]): entry[4:6] for entry in entries}


def _content(code: bytes, section: tuple[int, int]) -> bytes:
    offset, size = section
    return code[offset : offset + size]


def _text(code: bytes, at: int) -> str:
    return code[at : code.index(b"\0", at)].decode()


def _symbols(code: bytes, sections: dict[str, tuple[int, int]]) -> list[str]:
    """The names of all symbols, in their order."""
    entry = "<IBBHQQ"
    table = struct.iter_unpack(entry, _content(code, sections[".symtab"]))
    return [_text(code, sections[".strtab"][0] + name) for name, *_ in table]


def _values(info: bytes) -> dict[tuple[int, int], int]:
    """(attribute, number of a symbol) -> value, of the entries that hold such a pair."""
    values = {}
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _HAS_VALUES:
            if size == 8:
                number, value = struct.unpack_from("<II", info, at)
                values[attribute, number] = value
            at += size
    return values

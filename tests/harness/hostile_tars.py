"""Tar files that must be refused, by what is wrong with them."""

from __future__ import annotations

import tarfile


def member(name, content=b"", kind=b"0", **fields):
    info = tarfile.TarInfo(name)
    info.size, info.type = len(content), kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT) + content.ljust(-(-len(content) // 512) * 512, b"\0")


def patched(name, at, raw, content=b""):
    """A member whose header is changed, with the checksum made to fit."""
    header = bytearray(member(name, content))
    header[at : at + len(raw)] = raw
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    return bytes(header)


def attributes(**values):
    records = b""
    for key, value in values.items():
        body = b" " + key.replace("_", ".").encode() + b"=" + value + b"\n"
        length = len(body) + len(str(len(body)))
        length = len(body) + len(str(length))
        records += str(length).encode() + body
    return records


GOOD = member("model_weights/common.pt", b"x")
HOSTILE = {
    "parent": (member("../evil.txt", b"x"), "../evil.txt would lie outside"),
    "parent inside": (member("model_weights/../../evil", b"x"), "model_weights/../../evil would lie outside"),
    "absolute": (member("/etc/cron.d/evil", b"x"), "/etc/cron.d/evil would lie outside"),
    "parent as pax path": (
        member("x", attributes(path=b"../../evil"), b"x") + member("fine", b"y"),
        "../../evil would lie outside",
    ),
    "parent as GNU name": (member("././@LongLink", b"../evil\0", b"L") + member("fine"), "../evil would lie outside"),
    "folder outside": (member("../../tmp", kind=b"5"), "../../tmp/ would lie outside"),
    "symbolic link": (member("model_weights", kind=b"2", linkname="/etc"), "model_weights is a symbolic link"),
    "hard link": (member("a", kind=b"1", linkname="/etc/passwd"), "a is a hard link"),
    "character device": (member("null", kind=b"3"), "null is a character device"),
    "block device": (member("sda", kind=b"4"), "sda is a block device"),
    "pipe": (member("pipe", kind=b"6"), "pipe is a pipe"),
    "old sparse": (member("holes", kind=b"S"), "holes is a sparse file"),
    "pax sparse": (member("x", attributes(GNU_sparse_map=b"0,1"), b"x") + member("holes"), "sparse file"),
    "unknown type": (member("odd", kind=b"Z"), "odd is of the unknown type"),
    "twice": (GOOD + GOOD, "model_weights/common.pt occurs twice"),
    "twice, spelt otherwise": (GOOD + member("./model_weights//common.pt", b"z"), "common.pt occurs twice"),
    "a file, then a folder": (GOOD + member("model_weights/common.pt/x", b"z"), "occurs twice"),
    "a folder, then a file": (GOOD + member("model_weights", b"z"), "model_weights occurs twice"),
    "negative size": (patched("minus", 124, b"\xff" * 12), "size of minus is -1"),
    "negative size, many": (patched("minus", 124, b"\xff" * 8 + b"\0" * 4), "size of minus is -"),
    "size in letters": (patched("odd", 124, b"zzzzzzzzzzz\0"), "size of odd is"),
    "huge size": (patched("huge", 124, b"\x80" + b"\x7f" * 11), "size of huge is"),
    "size beyond the end": (patched("long", 124, b"00000100000\0"), "cut short: long needs bytes up to"),
    "negative size in pax": (member("x", attributes(size=b"-512"), b"x") + member("y"), "size"),
    "size of everything": (member("x", attributes(size=b"4"), b"g") + member("y"), "gives every member the same size"),
    "huge header": (member("x", b"a" * (2 << 20), b"x") + member("y"), "header of 2,097,152 bytes"),
    "huge name": (member("././@LongLink", b"a" * (2 << 20), b"L") + member("y"), "header of 2,097,152 bytes"),
    "broken attributes": (member("x", b"999 path=a\n", b"x") + member("y"), "not those of pax"),
    "attributes of length 0": (member("x", b"0 path=a\n", b"x") + member("y"), "not those of pax"),
    "two names": (
        member("././@LongLink", b"one\0", b"L") + member("././@LongLink", b"two\0", b"L") + member("y"),
        "two names or sizes",
    ),
    "a name for nothing": (member("././@LongLink", b"one\0", b"L"), "a long name and no contents"),
    "no name": (member("./", b"x", kind=b"7"), "has the name"),
    "checksum": (member("a", b"x")[:100] + b"9" + member("a", b"x")[101:], "no header of a member"),
    "garbage": (GOOD + b"\x01" * 512, "no header of a member"),
    "control characters": (member("../\x1b[2J", b"x"), "would lie outside"),
}

"""What a disk may hold after a power cut, worked out from the changes that a run made and the syncs between them.

The trace (`fault_trace` of fault.c) has one line for every change below a folder, the bytes of `data` behind it:

    folder INODE PATH | file INODE PATH | data INODE OFFSET LENGTH | size INODE LENGTH | sync INODE
    rename FROM TO    | exchange A B    | link FROM TO             | remove PATH

What may be there after a cut behind any of them:

    bytes and length of a file    as at its last sync; each later change, or not, or half of it, or only the length
    names in a folder             as at the last sync of that folder; each later change, or not; one that concerns two
                                  names (rename, exchange) as a whole
    syncing a file                says nothing of its name; syncing a folder says nothing of what its files hold

No file system is as bad as this: ext4 and XFS keep the order of names, and ext4 writes bytes before lengths.
"""

import os
from dataclasses import dataclass
from pathlib import Path

GARBAGE = b"\xa5"
NEVER = 1 << 60
ABSENT, LENGTH, HALF, THERE = range(4)  # how much of a change has arrived


@dataclass(eq=False)
class Change:
    """What one call changed.

    Attributes:
        at: Number of the call.
        node: The file, or the folder whose sync makes names last; 0 is the outermost folder.
        names: `{(folder, name): node or None}`; empty for changes of a file.
        start: Where data begins; the new length if there is none.
        data: What was written.
    """

    at: int
    node: int
    names: dict
    start: int = 0
    data: bytes | None = None


def parsed(log):
    """The calls in a log."""
    calls, at = [], 0
    while at < len(log):
        end = log.index(b"\n", at)
        name, _, rest = log[at:end].decode().partition(" ")
        at = end + 1
        if name in ("folder", "file"):
            inode, _, path = rest.partition(" ")
            calls.append((name, int(inode), path))
        elif name in ("data", "size", "sync"):
            inode, *numbers = map(int, rest.split())
            data = log[at : at + numbers[1]] if name == "data" else None
            at += len(data or b"")
            calls.append((name, inode, numbers[0] if numbers else 0, data))
        else:
            calls.append((name, *rest.split("\t")))
    return calls


def calls_for(top):
    """Calls that would make what is below a folder, and sync it."""
    calls = []
    for folder, folders, files in os.walk(top):
        inside = [("folder", folders), ("file", files)]
        calls += [(kind, (Path(folder) / n).stat().st_ino, f"{folder}/{n}") for kind, names in inside for n in names]
        calls.append(("sync", Path(folder).stat().st_ino, 0, None))
        for path in (Path(folder) / name for name in files):
            inode = path.stat().st_ino
            calls += [("data", inode, 0, path.read_bytes()), ("sync", inode, 0, None)]
    return calls


class Trace:
    """The changes below a folder.

    Args:
        calls: All that ever happened there.
        top: The folder.
        without: Numbers of syncs that are taken as if they had not been made.

    Attributes:
        changes: What the calls changed, in order.
        last: Number of the call from which on a change is there for good; none if there is no such call.
        synced: What each sync was of: number of the call -> path below the folder.
        files: Nodes that are files.
    """

    def __init__(self, calls, top, without=()):
        self.changes, self.last, self.files, self.synced = [], {}, set(), {}
        nodes, live, paths = {Path(top).stat().st_ino: 0}, {0: {}}, {0: "."}

        def place(path):
            *folders, name = Path(path).relative_to(top).parts
            node = 0
            for folder in folders:
                node = live[node][folder]
            return node, name

        for at, (call, *words) in enumerate(calls):
            if call == "sync":
                self.synced[at] = paths[nodes[words[0]]]
                for change in self.changes if at not in without else ():
                    if change.node == nodes[words[0]]:
                        self.last.setdefault(change, at)
                continue
            if call in ("data", "size"):
                self.changes.append(Change(at, nodes[words[0]], {}, *words[1:]))
                continue
            if call in ("folder", "file"):
                node = nodes[words[0]] = len(live)
                live[node], paths[node] = {}, str(Path(words[1]).relative_to(top))
                if call == "file":
                    self.files.add(node)
                names = {place(words[1]): node}
            elif call == "remove":
                names = {place(words[0]): None}
            else:
                one, other = map(place, words)
                node, there = live[one[0]][one[1]], live[other[0]].get(other[1])
                names = {one: {"rename": None, "exchange": there, "link": node}[call], other: node}
            for (folder, name), node in names.items():
                live[folder][name] = node
            self.changes.append(Change(at, [*names][-1][0], names))

    def pending(self, cut):
        """Changes that may or may not have arrived when only the first `cut` calls were made."""
        return [change for change in self.changes if change.at < cut <= self.last.get(change, NEVER)]

    def image(self, cut, arrived):
        """What is there after the first `cut` calls if so much of each pending change has arrived."""
        return Image([(change, arrived.get(change, THERE)) for change in self.changes if change.at < cut], self.files)

    def choices(self, cut, rng, more):
        """What may have arrived: all, nothing, names or bytes only, each name's change on its own, so many at random."""
        pending = self.pending(cut)
        if not pending:
            yield {}
            return
        for names in (ABSENT, THERE):
            for data in (ABSENT, LENGTH, THERE):
                yield {change: names if change.names else data for change in pending}
        for alone in (change for change in pending if change.names):
            yield {change: THERE if change is alone else ABSENT for change in pending}
            yield {change: ABSENT if change is alone else THERE for change in pending}
        for _ in range(more):
            yield {change: rng.choice((ABSENT, LENGTH, HALF, THERE)) for change in pending}


class Image:
    """What a disk holds.

    Args:
        changes: Each with how much of it has arrived.
        files: Nodes that are files.
    """

    def __init__(self, changes, files):
        self._names, self._changes, self._files = {}, {}, files
        self.key = tuple((change.at, how) for change, how in changes if how != ABSENT)
        for change, how in changes:
            if how == ABSENT:
                continue
            if not change.names:
                self._changes.setdefault(change.node, []).append((change, how))
            for (folder, name), node in change.names.items():
                self._names.setdefault(folder, {})[name] = node

    def tree(self, *path):
        """What is at a path: the bytes of a file; of a folder those of all files in it by name; None if there is nothing."""
        node = 0
        for name in path:
            node = self._names.get(node, {}).get(name)
            if node is None:
                return None
        return self._below(node)

    def _below(self, node):
        if node in self._files:
            return self._content(node)
        found = {}
        for name, child in self._names.get(node, {}).items():
            inside = None if child is None else self._below(child)
            if isinstance(inside, dict):
                found |= {f"{name}/{more}": data for more, data in inside.items()} or {f"{name}/": b""}
            elif inside is not None:
                found[name] = inside
        return found

    def _content(self, node):
        content = bytearray()
        for change, how in self._changes.get(node, ()):
            data = b"" if change.data is None else change.data
            data = {LENGTH: GARBAGE * len(data), HALF: data[: len(data) // 2], THERE: data}[how]
            end = change.start + len(data)
            if change.data is None:
                del content[end:]
                content.extend(bytes(end - len(content)))
            else:
                content.extend(GARBAGE * (end - len(content)))
                content[change.start : end] = data
        return bytes(content)

    def restore(self, top):
        """Makes a folder what the image says; files that are right already are not touched."""
        wanted = self.tree()
        for path in sorted(top.rglob("*"), reverse=True):
            name = str(path.relative_to(top))
            if path.is_dir():
                if not any(path.iterdir()):
                    path.rmdir()
            elif name not in wanted or path.read_bytes() != wanted[name]:
                path.unlink()
        for name, data in wanted.items():
            path = top / name
            if name.endswith("/"):
                path.mkdir(parents=True, exist_ok=True)
            elif not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)

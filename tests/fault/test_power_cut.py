"""Power cuts at every moment of real runs: on all that a disk may hold then (see crash.py), the result is right or absent.

The controls leave syncs out of the recorded runs: what each of them is for breaks without it, and nothing else does.
"""

import random
from collections import Counter

import pytest
from crash import ABSENT, Trace, calls_for, parsed
from injection import COMPILER, BeginningAnew, Case, PairLed, Replacing, Resuming, case_of

from harness.checkpoints import write_llama

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler: calls cannot be recorded")

# so slow and so often saved that there is something to take over at most moments
OFTEN = {"constants": {"execute.run._SAFE_POINT_SECONDS": 0.0}, "phase": ["working", 0.06]}
EXPORT = (
    "export-hf",
    "SRC",
    "DST",
    "--max-shard-size",
    "60kB",
    "--max-memory",
    "128KiB",
    "--threads",
    "1",
    "--progress",
)


def small_llama(_, place):
    """A Llama of 214 kB, for which 128 KiB at a time are several tasks."""
    write_llama(place / "iter_0000007", layers=2, hidden=64, ffn=128, vocab=256)
    return place / "iter_0000007"


RUNS = {
    "export-hf": lambda *where: Case(*where, "", *EXPORT, "off", make=small_llama),
    "replacing": lambda *where: Replacing(*where, "", *EXPORT, "off", "--overwrite", make=small_llama),
    "resuming": lambda *where: Resuming(*where, "", *EXPORT, "off", make=small_llama),
    "beginning anew": lambda *where: BeginningAnew(*where, "", *EXPORT, "off", make=small_llama),
    "torch": lambda *where: case_of(*where, "torch", "--max-memory", "256KiB"),
    "reshard": lambda *where: case_of(*where, "reshard", "--max-memory", "256KiB"),
    "manifest": lambda *where: case_of(*where, "manifest"),
    "ranks": lambda *where: case_of(*where, "rank 0"),
}
"""Commands whose runs are recorded."""


def content(path):
    """Bytes of a file, of all files in a folder by name, None if there is nothing."""
    if not path.exists():
        return None
    if path.is_file():
        return path.read_bytes()
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


class Recorded:
    """A run that went well, and what it changed.

    Attributes:
        calls: What made the disk's contents: first those that it had before the run.
        first: How many calls had been made before.
    """

    def __init__(self, server, root, name):
        self.root, self.case = root, RUNS[name](server, root)
        self.out = self.case.out
        self.case.clean()
        self.old, before = content(self.out), calls_for(root)
        log = server.folder / f"trace-{name}"
        run = OFTEN | {"trace": [str(log), str(root)]}
        if isinstance(self.case, PairLed):
            ended = server.ranks(2, self.case.argv, dict.fromkeys(range(2), run))
        else:
            ended = server.together([run | {"argv": self.case.argv}])
        assert {run.code for run in ended} == {0}, ended
        assert self.case.complete()
        self.wanted = content(self.out)
        self.calls, self.first = before + parsed(log.read_bytes()), len(before)

    def trace(self, without=()):
        return Trace(self.calls, self.root, without)

    def verdict(self, image, cut):
        """What is wrong with an image: nothing (None), `broken` or, though the run had said that all is done, `lost`."""
        found = image.tree(*self.out.relative_to(self.root).parts)
        if found == self.wanted:
            return None
        if found != self.old:
            return "broken"
        return "lost" if cut == len(self.calls) else None

    def images(self, trace, more):
        rng = random.Random(0)
        for cut in range(self.first, len(self.calls) + 1):
            for arrived in trace.choices(cut, rng, more):
                yield trace.image(cut, arrived), cut

    def verdicts(self, without=(), more=2):
        """How many images are right (None), `broken`, `lost`; and the different ones among them."""
        found, different = Counter(), {}
        for image, cut in self.images(self.trace(without), more):
            found[self.verdict(image, cut)] += 1
            different.setdefault(image.key, image)
        return found, list(different.values())

    def rerun(self, images, most):
        """Runs the command again on some images, half of them with something to take over.

        Yields:
            What was wrong then, if anything was, and whether the run took work over.
        """
        journal = (*self.out.parent.relative_to(self.root).parts, f".{self.out.name}.distckpt-partial", ".journal")
        rng = random.Random(1)
        begun = [image for image in images if (image.tree(*journal) or b"").count(b"\n") > 1]
        others = [image for image in images if image not in set(begun)]
        chosen = rng.sample(begun, min(len(begun), max(most // 2, most - len(others))))
        chosen += rng.sample(others, min(len(others), most - len(chosen)))
        for image in chosen:
            image.restore(self.root)
            complete = self.case.complete()
            try:
                said = self.case.again(complete, "again")
                assert self.case.complete()
                self.case.tidy("again")
                yield None, "kept from before" in said
            except AssertionError as error:
                yield str(error), False


@pytest.fixture(scope="module")
def recorded(server, memory):
    made = {}

    def record(name):
        if name not in made:
            made[name] = Recorded(server, memory(), name)
        return made[name]

    return record


@pytest.mark.parametrize("name", RUNS)
def test_the_recorded_calls_make_what_is_there(recorded, name):
    """No change was missed: with all of them there, an image is what the run left."""
    run = recorded(name)
    trace = run.trace()
    assert trace.image(run.first, {}).tree(*run.out.relative_to(run.root).parts) == run.old
    run.case.clean()
    trace.image(len(run.calls), {}).restore(run.root)
    assert run.case.complete()
    run.case.tidy("restored")


@pytest.mark.parametrize(("more", "reruns"), [(1, 12), pytest.param(8, 300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RUNS)
def test_whatever_is_left_is_right_or_absent(recorded, name, more, reruns, record_property):
    """And the same command makes it right."""
    run = recorded(name)
    found, images = run.verdicts(more=more)
    assert set(found) == {None}
    reran = list(run.rerun(images, reruns))
    assert not [wrong for wrong, _ in reran if wrong]
    kept = sum(kept for _, kept in reran)
    for figure, value in (("calls", len(run.calls) - run.first), ("images", len(images)), ("kept", kept)):
        record_property(figure, value)
    print(f"{name}: {len(run.calls) - run.first} calls, {len(images)} different images, {kept} reruns took work over")


# ---------------------------------------------------------------------- what each sync is for


def syncs(run):
    """The run's syncs of its own files and folders, in order, by path."""
    found = {}
    for at, path in run.trace().synced.items():
        if at >= run.first:
            found.setdefault(path, []).append(at)
    return found


PARTIAL = "dst/.out.distckpt-partial"
DATA = f"{PARTIAL}/model-"
LEFT_OUT = {
    "all of them": (lambda path, numbers: numbers, {"broken", "lost"}),
    "of files": (lambda path, numbers: numbers if path.startswith(f"{PARTIAL}/") else [], {"broken"}),
    "of the folder": (lambda path, numbers: numbers if path == PARTIAL else [], {"broken"}),
    "of the result's name": (lambda path, numbers: numbers[-1:] if path == "dst" else [], {"lost"}),
    "of the name of the folder above": (lambda path, numbers: numbers if path == "." else [], {"lost"}),
    "of new files": (lambda path, numbers: numbers[:1] if path.startswith(DATA) else [], {"misleading"}),
    "before the journal": (lambda path, numbers: numbers[1:-1] if path.startswith(DATA) else [], {"misleading"}),
}
"""Which syncs of a path are left out, and what is wrong with images then; `misleading`: the next run makes it wrong."""


@pytest.mark.parametrize("what", LEFT_OUT)
def test_without_syncing_it_is_not(recorded, what):
    """Negative controls, one for each promise that rests on a sync."""
    run, (chosen, wrong) = recorded("export-hf"), LEFT_OUT[what]
    left_out = {number for path, numbers in syncs(run).items() for number in chosen(path, numbers)}
    assert left_out
    found, images = run.verdicts(left_out)
    found = set(found) - {None}
    if not found and any(wrong for wrong, _ in run.rerun(images, 120)):
        found = {"misleading"}
    assert found == wrong


@pytest.mark.parametrize("what", ["nothing", "new folders"])
def test_what_the_journal_says_is_kept(recorded, what):
    """Of what was said to be done nothing is done again, even if no more than what was synced is there."""
    run = recorded("export-hf")
    journal = [at for path, numbers in syncs(run).items() if path.endswith("/.journal") for at in numbers]
    folders = [at for path, numbers in syncs(run).items() if path == PARTIAL for at in numbers]
    trace = run.trace([at for at in folders if at < journal[1]] if what == "new folders" else [])
    cuts = range(journal[1] + 1, next(at for at in folders if at > journal[1]))  # from its first task to its removal
    images = [trace.image(cut, dict.fromkeys(trace.pending(cut), ABSENT)) for cut in list(cuts)[::10]]
    assert list(run.rerun(images, len(images))) == [(None, what == "nothing")] * len(images)


def test_an_earlier_journal_must_be_gone_before_files_are_made_anew(recorded):
    """Negative control: without that sync it says of new files that they are complete."""
    run = recorded("beginning anew")
    _, images = run.verdicts(syncs(run)[PARTIAL][:1])
    assert any(wrong for wrong, _ in run.rerun(images, 120))

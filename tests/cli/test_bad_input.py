"""What people do wrong, on the command line: one sentence, the facts, a hint, the exit code, and nothing left behind."""

import copy
import errno
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from converters.formats.dcp import reader as dcp
from converters.pickles.nodes import fields, set_field
from distckpt_cli.app import main
from harness.checkpoints import copy_golden, edit_metadata, flip, payloads, run_cli, tree
from harness.support import GOLDEN, nobody


@pytest.fixture
def place(tmp_path):
    """`src/iter_0000010`, a good checkpoint, and `dst/`, a folder to export into."""
    copy_golden("llama_adam_tp2pp2", tmp_path / "src" / "iter_0000010")
    (tmp_path / "dst").mkdir()
    return tmp_path


def export(capsys, *args):
    """Exit code and stderr of `export-hf` in this process."""
    code = main(["export-hf", *map(str, args), "--progress", "off"])
    captured = capsys.readouterr()
    assert code == 0 or not captured.out
    return code, captured.err


def refused(capsys, code, sentence, *args, hint=True, facts=()):
    """Runs an export that must fail as the design says; returns its complaint."""
    got, text = export(capsys, *args)
    assert got == code, text
    first = next(line for line in text.splitlines() if not line.startswith("note: "))
    assert first.startswith("error: "), text
    assert re.search(sentence, first), text
    assert "Traceback" not in text
    assert ".py" not in text
    assert ("hint: " in text) >= hint, text
    for fact in facts:
        assert fact in text, text
    # the same as a document
    assert main(["export-hf", *map(str, args), "--progress", "off", "--json"]) == code
    document = json.loads(capsys_out(capsys))
    assert document["error"]["exit_code"] == code
    assert re.search(sentence, document["error"]["message"])
    return text


def capsys_out(capsys):
    return capsys.readouterr().out


def nothing_left(folder):
    return not list(folder.iterdir())


def test_a_wrong_path(place, capsys):
    refused(capsys, 3, "does not exist", place / "src" / "iter_000010", place / "dst" / "o", facts=["iter_0000010?"])
    refused(capsys, 3, "does not exist", place / "nowhere", place / "dst" / "o", hint=False)
    assert nothing_left(place / "dst")


def test_an_empty_folder(place, capsys):
    (place / "empty").mkdir()
    refused(capsys, 3, "is empty", place / "empty", place / "dst" / "o", hint=False)
    assert nothing_left(place / "dst")


def test_a_file_instead_of_a_folder(place, capsys):
    (place / "model.bin").write_bytes(b"\0" * 1000)
    refused(capsys, 3, "is not a checkpoint", place / "model.bin", place / "dst" / "o", hint=False)
    assert nothing_left(place / "dst")


def test_an_unfinished_save(place, capsys):
    source = place / "src" / "iter_0000010"
    (source / ".metadata").unlink()
    refused(capsys, 3, r"\.metadata is missing: the save was not finished", source, place / "dst" / "o")
    shutil.copytree(GOLDEN / "nemo2_llama4_weights_tp2pp2", place / "nemo")
    outer = next((place / "nemo").iterdir())
    outer.with_name(outer.name + "-unfinished").touch()
    refused(capsys, 3, "is unfinished", place / "nemo", place / "dst" / "o")
    assert nothing_left(place / "dst")


def test_a_stale_tracker(place, capsys):
    (place / "src" / "latest_checkpointed_iteration.txt").write_text("20")
    refused(capsys, 3, "no iter_0000020", place / "src", place / "dst" / "o", facts=["iter_0000010"])


def test_a_missing_shard(place, capsys):
    (place / "src" / "iter_0000010" / "__1_0.distcp").unlink()
    text = refused(capsys, 1, r"__1_0\.distcp is missing", place / "src", place / "dst" / "o")
    assert "decoder.layers." in text
    assert nothing_left(place / "dst")


def test_a_shard_that_no_weight_needs_may_be_missing(place, capsys):
    """Optimizer state is not exported, so what holds nothing else is not needed."""
    source = place / "src" / "iter_0000010"
    weights = {path.name for _, path, _, _ in payloads(source, "weight")}
    spare = [path for path in source.glob("*.distcp") if path.name not in weights]
    for path in spare:
        path.unlink()
    code, text = export(capsys, source, place / "dst" / "o")
    assert code == 0, text


def test_a_truncated_shard(place, capsys):
    source = place / "src" / "iter_0000010"
    name, path, begin, _ = payloads(source, "weight")[0]
    size = path.stat().st_size
    os.truncate(path, begin + 10)
    refused(
        capsys,
        1,
        rf"{re.escape(path.name)} is {begin + 10:,} bytes, the metadata needs {size:,}",
        *(source, place / "dst" / "o"),
        facts=[re.sub(r"layers\.\d+", "layers.", name).split(".")[0]],
    )
    assert nothing_left(place / "dst")


def test_a_flipped_byte(place, capsys):
    source = place / "src" / "iter_0000010"
    name, path, begin, size = payloads(source, "weight")[5]
    flip(path, begin + size // 2)
    text = refused(capsys, 1, f"{path.name} is damaged: the bytes of .* do not match", source, place / "dst" / "o")
    assert re.search(r"stored CRC-32 [0-9a-f]{8}, computed [0-9a-f]{8}", text), name
    assert nothing_left(place / "dst")


def test_a_hole_in_the_metadata(place, capsys):
    source, key = place / "src" / "iter_0000010", "decoder.layers.mlp.linear_fc1.weight"
    edit_metadata(source, lambda state: fields(state["state_dict_metadata"][key])["chunks"].pop())
    refused(capsys, 1, "no chunk covers", source, place / "dst" / "o", facts=[key.replace("layers", "layers.")[:15]])
    assert nothing_left(place / "dst")


def test_an_unknown_architecture(place, capsys):
    refused(capsys, 2, "unknown architecture 'bert'", place / "src", place / "dst" / "o", "--arch", "bert")
    refused(capsys, 4, "gpt2|GPT2", place / "src", place / "dst" / "o", "--arch", "gpt2", hint=False)
    assert nothing_left(place / "dst")


def test_weights_that_no_architecture_has_a_place_for(place, capsys):
    def change(state):
        tensors, records = state["state_dict_metadata"], state["storage_data"]
        old = "decoder.final_layernorm.weight"
        tensors["decoder.strange.weight"] = tensors[old]
        for index in list(records):
            if fields(index)["fqn"] == old:
                twin = copy.deepcopy(index)
                set_field(twin, "fqn", "decoder.strange.weight")
                records[twin] = records[index]

    source = place / "src" / "iter_0000010"
    edit_metadata(source, change)
    text = refused(capsys, 4, "lost without a reason|no place", source, place / "dst" / "o")
    assert "decoder.strange.weight" in text
    assert nothing_left(place / "dst")


def test_a_contradicting_config(place, capsys):
    assert export(capsys, place / "src", place / "made")[0] == 0
    config = json.loads((place / "made" / "config.json").read_text())
    (place / "made" / "config.json").write_text(json.dumps(config | {"hidden_size": 4096}))
    argv = (place / "src", place / "dst" / "o", "--hf-config", place / "made")
    refused(capsys, 4, "does not fit the checkpoint", *argv, facts=["hidden_size", "4096", "32"])
    argv = (place / "src", place / "dst" / "o", "--hf-config", place / "src")
    refused(capsys, 3, r"has no config\.json", *argv)
    assert nothing_left(place / "dst")


def test_dst_exists(place, capsys):
    out = place / "dst" / "o"
    out.mkdir()
    (out / "theirs").touch()
    text = refused(capsys, 5, "already exists and is not empty", place / "src", out, facts=["choose another directory"])
    assert "--overwrite" not in text  # it would be refused, too
    (out / "config.json").touch()
    refused(capsys, 5, "already exists and is not empty", place / "src", out, facts=["or add --overwrite"])
    (place / "dst" / "file").touch()
    refused(capsys, 5, "exists and is not a directory", place / "src", place / "dst" / "file")
    (place / "dst" / "link").symlink_to(place / "gone")
    refused(capsys, 5, "dangling", place / "src", place / "dst" / "link", hint=False)
    refused(capsys, 5, "is not a directory", place / "src", place / "dst" / "file" / "x", hint=False)
    assert {path.name for path in (place / "dst").iterdir()} == {"o", "file", "link"}
    assert {path.name for path in out.iterdir()} == {"theirs", "config.json"}


def test_the_working_directory_is_not_pulled_from_under_the_shell(place, capsys, monkeypatch):
    here = place / "dst" / "here"
    (here / "empty").mkdir(parents=True)
    (here / "config.json").touch()  # --overwrite would take it for a model
    monkeypatch.chdir(here / "empty")
    for where, what in ((".", "is the"), ("..", "contains the")):
        text = refused(
            capsys, 5, f"{what} working directory", place / "src", where, "--overwrite", facts=[f"{where}/NAME"]
        )
        assert "mount" not in text
    monkeypatch.chdir(here)
    assert export(capsys, place / "src", "empty")[0] == 0


def test_at_most_one_folder_above_dst_is_made(place, capsys):
    """A disk that is not mounted would else go unnoticed until the root disk is full."""
    into = place / "dst" / "scratch" / "run"
    refused(capsys, 5, "nor does the directory above it", place / "src", into / "o", facts=[f"mkdir -p {into}"])
    assert nothing_left(place / "dst")
    assert export(capsys, place / "src", into)[0] == 0


def test_an_empty_dst_is_fine_and_a_link_to_it_too(place, capsys):
    (place / "dst" / "o").mkdir()
    (place / "dst" / "l").symlink_to(place / "dst" / "o")
    assert export(capsys, place / "src", place / "dst" / "l")[0] == 0
    assert (place / "dst" / "l").is_symlink()
    assert (place / "dst" / "o" / "model.safetensors").exists()


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
def test_dst_inside_or_around_src(place, capsys, overwrite):
    source, before = place / "src" / "iter_0000010", tree(place)
    (place / "alias").symlink_to(place / "src")
    for target, sentence in (
        (source, "the source itself"),
        (source / "hf", "inside the source"),
        (source / "a" / ".." / "hf", "inside the source"),
        (place / "alias" / "iter_0000010" / "hf", "inside the source"),
        (place / "src", "contains the source"),
        (place, "contains the source"),
    ):
        refused(capsys, 5, sentence, source, target, *overwrite)
    (place / "alias").unlink()
    assert tree(place) == before


def test_wrong_options(place, capsys):
    for option, sentence in (
        (("--mtp", "maybe"), "--mtp 'maybe'"),
        (("--threads", "0"), "--threads must be 1 or more"),
        (("--max-memory", "lots"), "--max-memory"),
        (("--max-shard-size", "0"), "--max-shard-size"),
        (("--dtype", "int4"), "--dtype|int4"),
        (("--nonsense",), "nonsense"),
    ):
        code, text = export(capsys, place / "src", place / "dst" / "o", *option)
        assert code in (2, 4), text
        assert re.search(sentence, text)
        assert "Traceback" not in text
    refused(capsys, 4, "128 rows", place / "src", place / "dst" / "o", "--vocab-size", "4000", hint=False)
    refused(capsys, 2, "max-memory", place / "src", place / "dst" / "o", "--max-memory", "1kB")
    assert nothing_left(place / "dst")


def test_names_that_are_too_long(place, capsys):
    code, text = export(capsys, place / "src", place / "dst" / ("x" * 250))
    assert code == 5, text
    code, text = export(capsys, place / "src", place / "dst" / ("x" * 300))
    assert code == 5, text
    code, text = export(capsys, place / ("x" * 300), place / "dst" / "o")
    assert code == 3, text
    assert nothing_left(place / "dst")


# ---------------------------------------------------------------------- permissions, as somebody who is not root


@pytest.fixture
def as_nobody(place, capsys, tmp_path):
    """Runs the command line as user `nobody` when the tests run as root, else as whoever runs them.

    In a fork of this process, in which everything is imported: nobody may not be able to read the interpreter.
    """
    assert export(capsys, place / "src", place / "warm")[0] == 0
    assert export(capsys, place / "src" / "x", place / "warm")[0] == 3
    for folder in (place, *place.parents):
        if not os.geteuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    log = tmp_path / "log"

    def run(*args):
        log.unlink(missing_ok=True)
        pid = os.fork()
        if not pid:
            try:
                fd = os.open(log, os.O_WRONLY | os.O_CREAT, 0o666)
                os.dup2(fd, 1)
                os.dup2(fd, 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                if not os.geteuid():
                    os.setgroups([])
                    os.setgid(65534)
                    os.setuid(65534)
                code = main([*map(str, args), "--progress", "off"])
                sys.stderr.flush()
                os._exit(code)
            finally:
                os._exit(99)
        _, status = os.waitpid(pid, 0)
        return subprocess.CompletedProcess(args, os.waitstatus_to_exitcode(status), "", log.read_text())

    return run


def complain(done, code, sentence):
    assert done.returncode == code, done.stderr
    assert re.search(sentence, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert "internal error" not in done.stderr


def test_no_permission_to_write(place, as_nobody):
    (place / "dst").chmod(0o555)
    done = as_nobody("export-hf", place / "src", place / "dst" / "o")
    complain(done, 5, "no permission to write")
    assert nothing_left(place / "dst")
    (place / "dst").chmod(0o700 if not os.geteuid() else 0o000)  # not even to look into
    done = as_nobody("export-hf", place / "src", place / "dst" / "inner" / "o")
    (place / "dst").chmod(0o755)
    complain(done, 5, "ermission")
    assert nothing_left(place / "dst")


def test_no_permission_to_read(place, as_nobody):
    (place / "dst").chmod(0o777)
    source = place / "src" / "iter_0000010"
    for path in (source / "__0_0.distcp", source / ".metadata", source / "common.pt", source):
        mode = path.stat().st_mode
        path.chmod(0o000)
        done = as_nobody("export-hf", source, place / "dst" / "o")
        path.chmod(mode)
        complain(done, 3, "ermission denied|reading .* failed")
        assert not (place / "dst" / "o").exists()
        shutil.rmtree(place / "dst" / ".o.distckpt-partial", ignore_errors=True)


@pytest.mark.skipif(bool(os.geteuid()), reason="mounting needs root")
def test_a_source_on_a_read_only_mount(place):
    """The source is never written to: not a lock, not a cache, not a time."""
    mounted = place / "mounted"
    mounted.mkdir()
    if subprocess.run(["mount", "--bind", place / "src", mounted], check=False).returncode:
        pytest.skip("cannot mount here")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", mounted], check=True)
        done = run_cli("export-hf", mounted, place / "dst" / "o", "--progress", "off")
        assert done.returncode == 0, done.stderr
        complain(
            run_cli("export-hf", place / "src", mounted / "o", "--progress", "off"), 5, "[Rr]ead-only|permission|inside"
        )
    finally:
        subprocess.run(["umount", mounted], check=True)


def test_the_source_is_never_changed(place, capsys):
    source = place / "src" / "iter_0000010"
    before, times = tree(source), {p.name: p.stat().st_mtime_ns for p in source.iterdir()}
    assert export(capsys, source, place / "dst" / "o")[0] == 0
    assert tree(source) == before
    assert {p.name: p.stat().st_mtime_ns for p in source.iterdir()} == times


def test_dry_run_writes_nothing(place, capsys):
    assert main(["export-hf", str(place / "src"), str(place / "dst" / "o"), "-n"]) == 0
    out = capsys.readouterr().out
    assert "nothing written" in out
    assert nothing_left(place / "dst")


@pytest.mark.parametrize("text", ["\x1b[31mred", "a\nb", "\u202eevil", "%s%d{}", "[bold]x[/bold]"])
def test_names_cannot_write_to_the_terminal(text, place, capsys):
    code, error = export(capsys, place / text, place / "dst" / "o")
    assert code == 3
    assert "\x1b" not in error
    assert "\u202e" not in error
    assert "[bold]" in error or text != "[bold]x[/bold]"
    assert len(error.splitlines()) <= 3


def test_the_destination_may_not_lie_in_the_training_root_that_was_named(place, capsys):
    root = place / "root"
    root.mkdir()
    shutil.copytree(GOLDEN / "llama_adam_tp2pp2" / "iter_0000010", root / "iter_0000010")
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    refused(capsys, 5, "inside the source", root, root / "hf")
    assert not (root / "hf").exists()


@pytest.mark.parametrize("command", ["diff", "verify", "reshard", "export-hf"])
def test_a_disk_that_fails_while_a_source_is_looked_at_is_no_bug_of_ours(command, tmp_path, monkeypatch, capsys):
    source = str(GOLDEN / "llama_adam_tp2pp2")
    words = {"diff": [source, source], "verify": [source]}.get(command, [source, str(tmp_path / "out")])
    words += ["--tp", "1"] if command == "reshard" else []
    real = dcp.status

    def status(path):
        if path.suffix == ".distcp":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path)

    monkeypatch.setattr(dcp, "status", status)
    assert main([command, *words]) == 3
    assert "__0_0.distcp failed: Input/output error" in capsys.readouterr().err


def test_no_permission_keeps_what_is_written_and_says_so_and_damage_leaves_no_folder(tmp_path, capsys):
    source = tmp_path / "ck"
    shutil.copytree(GOLDEN / "llama_adam_tp2pp2", source)
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    path = source / "iter_0000010" / "__1_0.distcp"
    path.chmod(0o000)
    with nobody(tmp_path):
        code, text = export(capsys, source, shared / "out")
    assert code == 3
    assert "Permission denied" in text
    assert f"kept in {shared / '.out.distckpt-partial'}" in text
    path.chmod(0o644)
    path.write_bytes(bytes(path.stat().st_size))
    assert export(capsys, source, tmp_path / "new" / "a")[0] in (1, 3)
    assert not (tmp_path / "new").exists()

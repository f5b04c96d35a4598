"""scripts/bench: every command has a row, and a ratio is that of the same round."""

import json

import pytest

import bench


def test_a_ratio_is_that_of_a_round():
    runs = {"ours": [2.0, 8.0, 3.0], "cp": [1.0, 4.0, 1.0]}
    results = {
        name: [{"wall": wall, "cpu": 1.0, "anonymous": 3 << 20} for wall in walls] for name, walls in runs.items()
    }
    line = bench.row("reshard", results)
    assert (line["ratio"], line["seconds"], line["floor"]) == (2.0, 3.0, 1.0)
    assert bench.shown(line) == "| `reshard` | 3.00 | 1.00 | 3 | cp + fsync | 1.00 | **2.00** |"
    alone = bench.row("verify", {"ours": [{"wall": 1.5, "cpu": 1.0, "anonymous": 0}]})
    assert bench.shown(alone) == "| `verify` | 1.50 | 1.00 | 0 |  |  |  |"


def test_commands_that_are_not_there_are_refused():
    with pytest.raises(SystemExit):
        bench.main(["--quick", "diff"])


@pytest.mark.slow  # twelve processes
def test_every_command_is_measured(tmp_path, capsys):
    assert (
        bench.main(["--quick", "--gib", "0.005", "--runs", "1", "--dir", str(tmp_path), "--json", str(tmp_path / "j")])
        == 0
    )
    table = json.loads((tmp_path / "j").read_text())["table"]
    assert [line["command"] for line in table] == list(bench.COMMANDS)
    assert all(line["seconds"] > 0 for line in table)
    assert [line["command"] for line in table if "ratio" in line] == [*bench.WRITERS, "load"]
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]

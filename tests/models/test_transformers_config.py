"""config.json as transformers' classes complete it, in a process without torch."""

import json
import os
import subprocess
import sys

import pytest

from converters.errors import FormatError
from converters.models import ARCHITECTURES
from converters.transformers_config import completed, from_transformers
from harness.cli_support import environment
from harness.import_cases import CASES, save

ASK = """
import json, resource, sys
from converters.transformers_config import class_keys, completed
asked = json.load(sys.stdin)
answers = [(completed(name, config), sorted(class_keys(name))) for name, config in asked]
print(json.dumps([answers, [name for name in ("torch", "transformers") if name in sys.modules]]))
"""


def asked(questions, **options):
    done = subprocess.run(
        [sys.executable, "-P", "-c", ASK],
        input=json.dumps(questions),
        text=True,
        capture_output=True,
        env=environment(),
        **options,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return json.loads(done.stdout)


def test_without_torch_the_answers_are_the_same(tmp_path):
    """For the class of every architecture, and in a folder with files that Python would import."""
    for name in ("torch", "transformers", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(f'a file of the folder was run')")
    questions = [
        (model.name, {"dtype": "bfloat16", "vocab_size": 250, "hidden_size": 64, "auto_map": {"AutoModel": "x.y"}})
        for model in ARCHITECTURES
    ]
    answers, imported = asked(questions, cwd=tmp_path)
    assert not imported
    for (name, config), (answer, keys) in zip(questions, answers, strict=True):
        own = json.loads(json.dumps(from_transformers(name, config | {"model_type": name})["config"]))
        own.pop("auto_map")
        assert answer == own
        assert keys == sorted(from_transformers(name, None)["config"])


def test_an_import_does_without_torch(tmp_path):
    """Neither torch nor transformers in the process of the command: 0.3 GiB, and two seconds of a processor."""
    save(next(iter(CASES)), tmp_path / "hf")
    code = (
        "import sys\nfrom distckpt_cli.app import main\n"
        "code = main(['import-hf', sys.argv[1], sys.argv[2], '-q'])\n"
        "sys.exit(code or ' '.join({'torch', 'transformers'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path / "hf"), str(tmp_path / "out")],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_configuration_that_transformers_does_not_take():
    with pytest.raises(FormatError, match=r"does not take this config.json as a llama"):
        completed("llama", {"num_hidden_layers": "many"})


def test_transformers_that_cannot_be_imported(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('no')")
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-P", "-c", ASK], input='[["llama", {}]]', text=True, capture_output=True, env=env
    )
    assert "transformers cannot be imported" in done.stderr

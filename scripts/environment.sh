# Sourced by the other scripts: makes sure that a virtual environment with distckpt in it exists, and puts it on PATH.
# Usage: . scripts/environment.sh [EXTRAS]      e.g. EXTRAS=test
# DISTCKPT_VENV chooses another place than .venv.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=${1:-}
venv=${DISTCKPT_VENV:-.venv}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: distckpt needs Python 3.11 or later; set PYTHON to one" >&2
    exit 2
}
unset PYTHONDONTWRITEBYTECODE # or every process compiles the sources anew: 0.3 s each
stamp="$venv/.distckpt-$extras-$(cat pyproject.toml scripts/constraints.txt | sha256sum | cut -c1-16)"
if [ ! -e "$stamp" ]; then
    echo "setting up $venv: torch, transformers and the rest are installed once; this takes a few minutes" >&2
    # an interrupted set-up leaves a python without pip: begin again
    "$venv/bin/python" -m pip --version > /dev/null 2>&1 || "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check \
        --constraint scripts/constraints.txt --editable ".${extras:+[$extras]}"
    touch "$stamp"
fi
PATH="$(cd "$venv/bin" && pwd):$PATH"
export PATH

#!/bin/sh
# Makes .venv with the locked dependencies and strop itself. Safe to call again: does nothing if all is there.
# Usage: requirements/install.sh [cpu|gpu]
set -eu
cd "$(dirname "$0")/.."
kind="${1:-cpu}"
lock="requirements/$kind.lock"
python="${PYTHON:-python3}"

fail() { echo "strop: $1" >&2; exit 2; }

[ "$(uname -s)" = Linux ] || fail "strop runs on Linux, this is $(uname -s); use a Linux machine or container."
command -v "$python" >/dev/null || fail "no $python found; install Python 3.11 or newer, or set PYTHON to it."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || fail "$("$python" --version) is too old; install Python 3.11 or newer, or set PYTHON to it."
"$python" -c 'import venv, ensurepip' 2>/dev/null \
    || fail "$python cannot make virtual environments; install its venv package (Debian: python3-venv)."

stamp=".venv/strop-installed"
wanted="$(cat "$lock" pyproject.toml requirements/install.sh | cksum) $kind"
folders="$(find serving evals memory speculators training kernels pipelines -type f ! -name '*.pyc' | sort | cksum)"
if [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" = "$wanted" ] && [ "$(tail -n 1 "$stamp")" = "$folders" ]; then
    exit 0
fi

if [ ! -f "$stamp" ] || [ "$(head -n 1 "$stamp")" != "$wanted" ]; then
    free_kib="$(df -Pk . | awk 'NR == 2 { print $4 }')"
    [ "$free_kib" -gt 7340032 ] || fail "$((free_kib / 1048576)) GiB free here, the environment needs 7 GiB; make room first."
    echo "strop: installing the locked $kind environment into .venv (1 to 5 minutes)" >&2
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9 \
        || fail "uv could not be installed from the package index; see pip's message above."
    # The CPU build of torch is not on the default index: a folder in PIP_FIND_LINKS may hold it, PyTorch's index does.
    if [ -n "${PIP_FIND_LINKS:-}" ] && ls "$PIP_FIND_LINKS"/torch-*+cpu*.whl >/dev/null 2>&1; then
        source_of_torch="--find-links $PIP_FIND_LINKS"
    elif [ "$kind" = cpu ]; then
        source_of_torch="--extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match"
    else
        source_of_torch=""
    fi
    # shellcheck disable=SC2086
    VIRTUAL_ENV="$PWD/.venv" .venv/bin/uv pip install --no-deps --compile-bytecode $source_of_torch -r "$lock" || fail \
        "the locked packages could not be installed. If torch's CPU build is what is missing: allow access to https://download.pytorch.org/whl/cpu, or put its wheel into a folder and set PIP_FIND_LINKS to that folder."
fi
# A strict editable install is a tree of links, which type checkers see; it is made anew when files come or go.
VIRTUAL_ENV="$PWD/.venv" .venv/bin/uv pip install --quiet --no-deps --config-settings editable_mode=strict -e . \
    || fail "strop itself could not be installed; see the message above."
printf '%s\n%s\n' "$wanted" "$folders" >"$stamp"

#!/usr/bin/env bash
# Sets up .venv on first use, then runs one thing in it.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/run.sh try [OPTION]...       the main job: serve the small model, or run the indexer where there is no GPU
       scripts/run.sh test [PYTEST ARG]...  the tests; those that need a GPU are skipped where there is none
       scripts/run.sh setup                 only the set-up
       scripts/run.sh COMMAND [ARG]...      anything else, in the caller's folder with .venv/bin first on PATH (python, ...)

The first call installs this checkout, SGLang 0.5.23 and pytest into .venv: about 10 GB and a few minutes. It needs
Linux, and uv or Python 3.11 or newer. Later calls install only after pyproject.toml has changed.

Environment:
  PYTHON  the interpreter of the new .venv (default: python3, or uv's choice)
  VENV    where the environment lives (default: .venv in this checkout)
TEXT
}

case "${1:-}" in
    -h | --help) usage; exit 0 ;;
    "" | -*) usage >&2; exit 2 ;;
esac

# Without bytecode each of SGLang's processes compiles its sources again.
unset PYTHONDONTWRITEBYTECODE
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv
python=$venv/bin/python

set_up() {
    # A folder that moved has absolute paths of its old place in it.
    local wanted
    wanted=$(cksum <"$root/pyproject.toml")" $root $venv"
    [[ -x $python && $(cat "$venv/.installed" 2>/dev/null) == "$wanted" ]] && return
    echo "Setting up $venv (SGLang 0.5.23 and its libraries; about 10 GB)" >&2
    local uv
    uv=$(command -v uv || true)
    # A uv that answers: some launchers are on PATH with nothing behind them.
    if [[ -n $uv ]] && "$uv" --version >/dev/null 2>&1; then
        [[ -x $python ]] || "$uv" venv --quiet --python "${PYTHON:->=3.11,<3.14}" "$venv"
    else
        local base=${PYTHON:-python3}
        if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "scripts/run.sh: $base is not Python 3.11 or newer, which SGLang needs; set PYTHON, or install uv" >&2
            exit 1
        fi
        [[ -x $python ]] || "$base" -m venv "$venv"
        "$python" -m pip install --quiet uv
        uv=$venv/bin/uv
    fi
    "$uv" pip install --quiet --python "$python" --compile-bytecode -e "$root[sglang,test]"
    echo "$wanted" >"$venv/.installed"
}

set_up
export PATH="$venv/bin:$PATH"
command=$1
shift
case "$command" in
    setup) ;;
    try) exec dsv41-sparse try "$@" ;;
    test)
        cd "$root"
        # Quick ones first; what starts a server comes last.
        [[ $# -gt 0 && $1 != -* ]] || set -- tests/unit tests/kernels tests/gpu tests/sglang "$@"
        exec python -m pytest --timeout 600 "$@"
        ;;
    *) exec "$command" "$@" ;;
esac

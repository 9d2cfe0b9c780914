#!/usr/bin/env bash
# Serve DeepSeek-V4.1 with the dsv41-sparse attention backend.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/serve.sh tiny|topology [OPTION]...     random weights, written where absent
       scripts/serve.sh CHECKPOINT [OPTION]...        a real checkpoint: a folder or a Hub name

Starts SGLang's server with --attention-backend dsv41-sparse. Every OPTION goes to sglang.launch_server and wins over
the defaults here, for example: --port 30001, --tp-size 4, --context-length 1048576, --attention-backend dsv4 (stock).

Environment:
  PYTHON       the Python that has SGLang and this package (default: that of .venv, which scripts/run.sh makes, else python)
  MODELS_DIR   where the random-weight models are written (default: small-models in this checkout)

Afterwards:
  curl -s localhost:30000/generate -H 'Content-Type: application/json' \
      -d '{"text": "The capital of France is", "sampling_params": {"max_new_tokens": 16, "temperature": 0}}'
TEXT
}

case "${1:-}" in
    -h | --help) usage; exit 0 ;;
    "" | -*) usage >&2; exit 2 ;;
esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-}
[[ -n $python || ! -x $root/.venv/bin/python ]] || python=$root/.venv/bin/python
python=${python:-python}
installed='import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, ("sglang", "sglang_dsv41"))))'
# -P: the checkout itself does not count as installed.
if ! "$python" -P -c "$installed"; then
    echo "scripts/serve.sh: $python does not have SGLang and this package; call scripts/run.sh setup first, or set PYTHON" >&2
    exit 1
fi
model=$1
shift
options=(--attention-backend dsv41-sparse)
case "$model" in
    tiny | topology)
        folder=${MODELS_DIR:-$root/small-models}/$model
        [[ -f $folder/config.json ]] || "$python" "$root/scripts/make_model.py" --preset "$model" --out "$folder"
        model=$folder
        options+=(--load-format dummy --context-length 262144 --mem-fraction-static 0.8 --cuda-graph-max-bs-decode 32
            --disable-flashinfer-autotune)
        ;;
    *) ;; # the checkpoint's own context limit, SGLang's own memory and graph defaults
esac
set -x
exec "$python" -m sglang.launch_server --model-path "$model" "${options[@]}" "$@"

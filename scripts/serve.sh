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
  PYTHON       the Python that has SGLang and this package (default: python)
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

python=${PYTHON:-python}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
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

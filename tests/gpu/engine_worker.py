"""One offline engine in a process of its own: sends prompts one at a time and writes the tokens.

python -m tests.gpu.engine_worker JOB.json     {"engine": {...}, "requests": [{"ids": [...], "new": 16}, ...], "out": FILE}
"""

import json
import sys
import time


def main() -> None:
    import sglang as sgl

    job = json.loads(open(sys.argv[1]).read())
    started = time.time()
    engine = sgl.Engine(**job["engine"])
    report = {"start_seconds": time.time() - started, "tokens": [], "cached": []}
    try:
        for request in job["requests"]:
            out = engine.generate(
                input_ids=request["ids"],
                sampling_params={"temperature": 0, "max_new_tokens": request["new"], "ignore_eos": True},
            )
            report["tokens"].append(out["output_ids"])
            report["cached"].append(out["meta_info"]["cached_tokens"])
            with open(job["out"], "w") as file:
                json.dump(report, file)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()

"""Main module of ``dsv41-sparse run MODULE``: loads SGLang's plugins, then becomes MODULE.

It must be the main module itself: ``multiprocessing`` re-imports that one in each process it spawns, under the name
``__mp_main__``, and looks the worker's target up in it. So a benchmark's workers load the plugins too, and find the
benchmark's own functions here.
"""

import os
import sys

if __name__ in ("__main__", "__mp_main__"):
    from sglang.srt.plugins import load_plugins

    from sglang_dsv41.cli import RUN_MODULE, module_spec

    load_plugins()
    _spec = module_spec(os.environ[RUN_MODULE])
    __file__ = _spec.origin
    __package__ = _spec.parent
    if __name__ == "__main__":
        sys.argv[0] = _spec.origin
    exec(_spec.loader.get_code(_spec.name), globals())  # noqa: S102 - what `python -m` does

"""Our backend where SGLang's attention unittest kit builds ``dsv4``; see ``scripts/run_upstream_tests.py``."""

import dataclasses
from unittest import mock

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

from sglang_dsv41 import BACKEND_NAME, backend, envs, requirements
from sglang_dsv41.geometry import CandidateGeometry

# The kit's models have one layer and no candidate blocks; the attention around them does not depend on these.
GEOMETRY = CandidateGeometry(topk_blocks=2048, block_size=8, topk=512, heads=32, source_layer=0, consumer_layers=(1,))
built = []


def ours(model_runner):
    """Our backend for a runner of the kit. Its requirements, which ask for a V4.1 model, are not asked."""
    facts = requirements.EngineFacts(geometry=GEOMETRY, index_page=64, forced_kernels=envs.forced_kernels())
    facts = dataclasses.replace(facts, **requirements.device_facts(model_runner.gpu_id))
    try:
        with (
            mock.patch.object(requirements, "gather", lambda _: facts),
            mock.patch.object(requirements, "check", lambda _: None),
            mock.patch.object(backend, "attention_backends", lambda: (BACKEND_NAME, BACKEND_NAME)),
        ):
            made = backend.create_backend(model_runner)
    except (AssertionError, ImportError) as error:
        # The kit would skip the case.
        raise RuntimeError(f"our backend could not be built: {error}") from error
    built.append(made)
    return made


def install() -> None:
    """Register ``ours`` under the name that the kit asks for."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    ATTENTION_BACKENDS["dsv4"] = ours

"""Entry point of the group ``sglang.srt.plugins``: makes ``--attention-backend dsv41-sparse`` a choice of SGLang.

SGLang calls ``register`` once in each process, before arguments are parsed. Importing this module imports nothing of
SGLang, and registering imports no GPU library: the backend is imported when a model runner asks for it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import BACKEND_NAME, envs, seams

logger = logging.getLogger(__name__)

NAME = BACKEND_NAME
# SGLang's own backend for the model, whose conventions ours has.
STOCK = "dsv4"
# SGLang renames DeepseekV41ForCausalLM to this when it reads a V4.1 config.
ARCHITECTURE = "DeepseekV4ForCausalLM"
CHOICE_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")

_registered = False


def register() -> None:
    """Register the backend, or log at ERROR why SGLang will not know its name; idempotent, never raises."""
    global _registered
    if _registered:
        return
    try:
        if envs.disabled():
            logger.warning("%s is set: SGLang will not accept --attention-backend %s.", envs.DISABLE, NAME)
            return
        mismatches = seams.check()
        if mismatches:
            logger.error(_refusal("; ".join(map(str, mismatches))))
            return
        _warn_if_untested()
        _register()
        _registered = True
    except Exception as error:
        logger.exception(_refusal(f"{type(error).__name__}: {error}"))  # noqa: TRY401 - one line must say it all


def create_backend(model_runner: Any) -> Any:
    """The attention backend of a model runner, by SGLang's registry."""
    from . import backend

    return backend.create_backend(model_runner)


def keep_choice(server_args: Any, hf_config: Any) -> dict[str, str]:
    """Model override: declares what the user chose, after SGLang's override declared its own backend."""
    kept = {field: NAME for field in CHOICE_FIELDS if getattr(server_args, field, None) == NAME}
    for field in kept:
        logger.info("Keeping --%s %s for %s.", field.replace("_", "-"), NAME, hf_config.architectures[0])
    return kept


def _register() -> None:
    # Everything that can fail comes before the first registration, so that it is all or nothing.
    # Providers answer in registration order and the last one wins: SGLang's goes first.
    import sglang.srt.arg_groups.model_overrides.deepseek_v4  # noqa: F401
    from sglang.srt.arg_groups import choices
    from sglang.srt.arg_groups.model_override_base import register_model_override
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(create_backend)
    register_model_override(ARCHITECTURE)(keep_choice)
    after_import("sglang.srt.layers.cp.base", _patch_cp_kind)
    after_import("sglang.srt.speculative.draft_utils", _patch_draft_maps)
    after_import("sglang.srt.model_executor.model_runner_components.attention_backend_setup", _patch_phase_split)
    after_import("sglang.srt.model_executor.runner.decode_cuda_graph_runner", _patch_graph_variants)
    after_import("sglang.srt.layers.attention.deepseek_v4_backend", _patch_candidate_objects)


def _patch_cp_kind(module: ModuleType) -> None:
    """Context parallelism asks for a calling convention by name; ours is that of SGLang's backend."""
    kind = module.CPAttentionBackendKind
    original = kind.from_string.__func__

    @functools.wraps(original)
    def from_string(cls: type, value: str) -> Any:
        return original(cls, STOCK if value == NAME else value)

    kind.from_string = classmethod(from_string)


def _patch_draft_maps(module: ModuleType) -> None:
    """Draft models inherit the target's backend name; they keep SGLang's own backend."""
    factory = module.DraftBackendFactory
    original = factory._create_backend

    @functools.wraps(original)
    def _create_backend(self: Any, backend_name: str, backend_map: dict, *args: Any, **kwargs: Any) -> Any:
        if STOCK in backend_map:
            backend_map = {**backend_map, NAME: backend_map[STOCK]}
        return original(self, backend_name, backend_map, *args, **kwargs)

    factory._create_backend = _create_backend


def _patch_phase_split(module: ModuleType) -> None:
    """Ours for one phase and SGLang's for the other are one backend, which knows its phases.

    SGLang would join two backends in its hybrid one, which does not have the calls that DeepSeek-V4 makes.
    """
    original = module._build_resolved_backend

    @functools.wraps(original)
    def _build_resolved_backend(*, model_runner: Any, resolved: Any, init_new_workspace: bool) -> Any:
        if {resolved.prefill, resolved.decode} != {NAME, STOCK}:
            return original(model_runner=model_runner, resolved=resolved, init_new_workspace=init_new_workspace)
        return module._build_backend_from_str(
            model_runner=model_runner, backend_str=NAME, init_new_workspace=init_new_workspace
        )

    module._build_resolved_backend = _build_resolved_backend


def _patch_graph_variants(module: ModuleType) -> None:
    """Where SGLang makes one decode graph a batch size, ours on Hopper gets those for short contexts."""
    original = module.create_dsv41_candidate_graph_variants

    @functools.wraps(original)
    def create_dsv41_candidate_graph_variants(
        model_runner: Any, capture_forward_mode: Any, captured_req_width: int = 0
    ) -> Any:
        variants = original(model_runner, capture_forward_mode, captured_req_width)
        if variants is not None:
            return variants
        from . import graph_variants

        return graph_variants.short_context_variants(model_runner, capture_forward_mode)

    module.create_dsv41_candidate_graph_variants = create_dsv41_candidate_graph_variants


def _patch_candidate_objects(module: ModuleType) -> None:
    """Past compute capability 10.x SGLang makes the candidate objects of SM100, which refuse to be made there: in a server
    of ours the target and its draft get those that need no DeepGEMM."""
    original = module.make_candidate_indexer

    @functools.wraps(original)
    def make_candidate_indexer(**arguments: Any) -> Any:
        from sglang.srt.runtime_context import attention_backends

        if NAME not in attention_backends():
            return original(**arguments)
        from . import backend

        return backend.stock_candidates(original, **arguments)

    module.make_candidate_indexer = make_candidate_indexer


def after_import(name: str, patch: Callable[[ModuleType], None]) -> None:
    """Patch a module when it is imported, or now if it is.

    SGLang's own hook registry imports each target when plugins are loaded; these targets bring in GPU libraries.
    """
    module = sys.modules.get(name)
    if module is not None:
        patch(module)
    else:
        sys.meta_path.insert(0, _PatchingFinder(name, patch))


class _PatchingFinder(importlib.abc.MetaPathFinder):
    """Finds one module as usual and patches it after it has run."""

    def __init__(self, name: str, patch: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.patch = patch

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self.patch(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)

        spec.loader.exec_module = exec_module
        return spec


def _warn_if_untested() -> None:
    from packaging.specifiers import SpecifierSet

    version = seams.installed_version()
    if version is not None and not SpecifierSet(seams.SUPPORTED).contains(version, prereleases=True):
        logger.warning(
            "dsv41-sparse was tested with SGLang %s and SGLang %s is installed. Every name that it relies on is there, so "
            "it is registered; watch its first outputs.",
            seams.SUPPORTED,
            version,
        )


def _refusal(reason: str) -> str:
    return (
        f"dsv41-sparse is NOT registered: SGLang will answer `--attention-backend {NAME}` with 'invalid choice'. "
        f"This release of sglang-dsv41 supports SGLang {seams.SUPPORTED}, installed is "
        f"{seams.installed_version() or 'no SGLang that Python knows of'}. What does not fit: {reason}. "
        f"Install sglang==0.5.23, or a release of sglang-dsv41 that names your SGLang version."
    )

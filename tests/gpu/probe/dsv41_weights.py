"""A test-only SGLang plugin: random weights that are one model, however many ranks share it.

SGLang draws dummy weights by the shape of a rank's shard, so two ranks serve another model than one GPU. Here each tensor
is drawn whole, by its name, and a rank takes its part. Put this folder on PYTHONPATH and set DSV41_WEIGHTS_SHAPES to a
file: a server of one rank writes the whole shapes there, servers of several ranks read them.
"""

import json
import os
import zlib

TARGET = "sglang.srt.model_loader.weight_utils.initialize_dummy_weights"
# Two projections in one tensor, each cut for itself.
MERGED = ("gate_up_proj.weight", "w13_weight")


def install() -> None:
    if os.environ.get("DSV41_WEIGHTS_SHAPES"):
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(TARGET, initialize_weights, HookType.REPLACE)


def initialize_weights(model, low: float = -1e-3, high: float = 1e-3, seed: int = 1234) -> None:
    """SGLang's dummy weights, but for where the numbers come from."""
    from sglang.srt.runtime_context import get_parallel

    fill(model, get_parallel().tp_rank, get_parallel().tp_size, low, high, os.environ["DSV41_WEIGHTS_SHAPES"])


def fill(model, rank: int, ranks: int, low: float, high: float, path: str) -> None:
    """Draw every floating-point tensor of ``model``, the part of ``rank``.

    Raises:
        ValueError: a tensor is not cut along one dimension into ``ranks`` equal parts, or is not in the file.
        FileNotFoundError: several ranks, and no server of one rank has written the shapes.
    """
    import torch

    tensors = {name: t for name, t in model.state_dict().items() if torch.is_floating_point(t)}
    if ranks == 1:
        shapes = {name: list(t.shape) for name, t in tensors.items()}
        with open(f"{path}.{os.getpid()}", "w") as file:
            json.dump(shapes, file)
        os.replace(file.name, path)
    else:
        with open(path) as file:
            shapes = json.load(file)
    for name, tensor in tensors.items():
        if name.endswith(("weight_scale_inv", "weight_scale_2")):
            tensor.fill_(1.0)
            continue
        if name not in shapes:
            raise ValueError(f"{name} {list(tensor.shape)}: one rank has no such tensor, so there is no whole of it")
        generator = torch.Generator(device=tensor.device).manual_seed(zlib.crc32(name.encode()))
        dtype = tensor.dtype if torch.finfo(tensor.dtype).bits >= 16 else torch.float16
        whole = torch.empty(shapes[name], dtype=dtype, device=tensor.device).uniform_(low, high, generator=generator)
        tensor.data.copy_(part(name, whole, tensor.shape, rank, ranks))


def part(name: str, whole, shape, rank: int, ranks: int):
    """The part of ``whole`` that a rank holds as ``shape``; all of it where it is not cut."""
    import torch

    cut = [d for d, (a, b) in enumerate(zip(whole.shape, shape, strict=True)) if a != b]
    if not cut:
        return whole
    if len(cut) > 1 or whole.shape[cut[0]] != shape[cut[0]] * ranks:
        raise ValueError(f"{name}: {list(whole.shape)} is not {list(shape)} on each of {ranks} ranks")
    pieces = whole.chunk(2 if name.endswith(MERGED) else 1, cut[0])
    return torch.cat([piece.chunk(ranks, cut[0])[rank] for piece in pieces], cut[0])

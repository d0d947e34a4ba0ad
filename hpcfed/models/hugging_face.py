"""Networks of Hugging Face `transformers`, from a folder on disk: `--model hf:DIR`.

Nothing is downloaded, and weights are only read from safetensors: other files are
pickles. Only a folder without weights gives a network with random ones.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcfed import plugins
from hpcfed.errors import UserError

if TYPE_CHECKING:  # the command line is checked without torch
    import torch
    from torch import nn

PREFIX = "hf:"
SAFE = {
    "local_files_only": True,
    "use_safetensors": True,
    # Make a new head if the classes differ from the folder's.
    "ignore_mismatched_sizes": True,
}
"""How weights are read."""
PIECE, PIECES = 2**16, 256
"""Bytes of a piece that a checksum reads, and about as many pieces of a large file."""
LOOK = "find_packed_sequence_indices"
"""The function by which transformers finds several texts in a row."""
TRACES = "is_tracing"
"""The function by which it learns whether a step is captured."""
_own: dict[str, Any] = {}
"""These functions, as they were before any network was called."""


def is_hugging_face(name: str) -> bool:
    """Tell whether a model's name means a folder of transformers."""
    return name.startswith(PREFIX)


def find_folder(name: str) -> Path:
    """Return the folder that `hf:DIR` means."""
    folder = Path(name.removeprefix(PREFIX)).expanduser()
    if not (folder / "config.json").is_file():
        raise UserError(
            f"--model {name}: {folder} has no config.json; give a folder that "
            "save_pretrained of transformers has made"
        )
    return folder


def checksum(folder: Path) -> str:
    """Return a checksum of a folder's network, of equally spaced pieces of each file
    with weights; empty without weights.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            # All of a small file, and its header in any case.
            for start in range(0, size, max(PIECE, size // PIECES)):
                file.seek(start)
                digest.update(file.read(PIECE))
    return digest.hexdigest()[:16] if files else ""


def has_weights(name: str) -> bool:
    """Tell whether the folder of `hf:DIR` has weights, or only describes a network."""
    return any(find_folder(name).glob("*.safetensors"))


def load(
    name: str,
    *,
    tokens: bool,
    generates: bool,
    classes: int,
    options: Mapping[str, Any],
    onto: "torch.device | None" = None,
) -> "nn.Module":
    """Return the network of a folder: a language model if it generates tokens, else a
    classifier of texts or of images.

    It is on the CPU in float32. Or `onto` is a device: then its weights are read, or
    drawn, there in bfloat16, and never held as a whole elsewhere.
    """
    folder = find_folder(name)
    try:
        import transformers
    except ImportError:
        raise UserError(
            f"--model {name} needs transformers: pip install 'hpcfed[hf]'"
        ) from None
    # Every rank loads it: their progress bars and reports would hide the run's own
    # lines.
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    kind = "AutoModelForImageClassification"
    if generates:
        kind = "AutoModelForCausalLM"
    elif tokens:
        kind = "AutoModelForSequenceClassification"
    with plugins.one_line_of(f"--model {name} cannot be loaded"):
        keywords = dict(options)
        if not generates:
            keywords["num_labels"] = classes
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **keywords
        )
        # Training never reads the cache of generation.
        config.use_cache = False
        maker = getattr(transformers, kind)
        if not has_weights(name):
            _refuse_pickles(name, folder)
        if onto is not None:
            placed = _placed(maker, config, folder, onto, read=has_weights(name))
            return without_looks(placed)
        network: nn.Module
        if has_weights(name):
            network = maker.from_pretrained(folder, config=config, **SAFE)
        else:
            network = maker.from_config(config)
        return without_looks(network.float())


def _placed(
    maker: Any, config: Any, folder: Path, device: "torch.device", *, read: bool
) -> "nn.Module":
    """Return a network in bfloat16 on a device; on `meta`, only its structure."""
    import torch

    network: nn.Module
    halves = {"dtype": torch.bfloat16}
    if device.type != "meta" and read:
        # Tensor by tensor from the mapped file: ranks of a node share its pages.
        network = maker.from_pretrained(
            folder, config=config, device_map={"": device}, **halves, **SAFE
        )
    else:
        with device:
            network = maker.from_config(config, **halves)
    return network


def without_looks(network: "nn.Module") -> "nn.Module":
    """Let a network make its masks without a look at its inputs, and in a captured step
    as in a plain one.

    To look for several texts in a row the host would wait for the device in every pass,
    so that no step could be captured. Without a mask there is one text. Rows of several
    texts come with their mask. And while a step is captured, Transformers would give
    attention a mask that is causal and nothing else: other kernels than those of a
    plain step, which round otherwise and are slower.
    """
    try:
        from transformers import masking_utils
    except ImportError:  # another version
        return network
    instead: dict[str, Callable[..., Any]] = {
        LOOK: lambda positions: None,
        TRACES: _traces,
    }
    known = [name for name in instead if hasattr(masking_utils, name)]
    for name in known:
        _own.setdefault(name, getattr(masking_utils, name))

    def before(*_: Any) -> None:
        for name in known:
            setattr(masking_utils, name, instead[name])

    def after(*_: Any) -> None:
        for name in known:
            setattr(masking_utils, name, _own[name])

    network.register_forward_pre_hook(before)
    network.register_forward_hook(after, always_call=True)
    return network


def _traces(mask: Any = None) -> bool:
    """Whether the values of a mask may not be looked at; without one there are none."""
    return mask is not None and bool(_own[TRACES](mask))


def _refuse_pickles(name: str, folder: Path) -> None:
    for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt"):
        for path in folder.glob(pattern):
            raise UserError(
                f"--model {name}: {path.name} is a pickle, which is never loaded; save "
                "the weights as safetensors"
            )

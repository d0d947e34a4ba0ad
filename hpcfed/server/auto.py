"""What --server auto chooses: on a GPU the paper's model, with a batch size and
precision that are fast there; on a CPU a model that learns in half a minute; and span
where p-diff would exceed the device's memory.
"""

from collections.abc import Iterator, Mapping, Set

from hpcfed.models.layout import Layout
from hpcfed.options import Choice, facts_of, flag_of
from hpcfed.server.fitting import shortage
from hpcfed.server.model_options import P_DIFF
from hpcfed.server.options import ServerOptions
from hpcfed.server.schedule import WHOLE_UP_TO, generated, num_learnings
from hpcfed.words import bytes_text

SECONDS = {"autoencoder": 12.0, "denoiser": 16.0}
"""Time that each network of --server tiny may train on one core in the whole run."""
GPU_BATCH = {"p-diff": 400, "span": 400, "tokens": 48}
"""Samples per step of the denoiser on a GPU. The total number of samples stays the
same, in fewer steps; for p-diff this reproduced the paper's figures (benchmarks/paper).
With 50 samples per step, kernel launches take most of the time. A sample of tokens is a
window, which is much more work.
"""
CPU_SAMPLES = {"autoencoder": (1_000, 16_000), "denoiser": (2_000, 32_000)}
"""The fewest samples from which a network learns anything, and what digits needs."""
START_CPU_SAMPLES = {"span": (2_000, 20_000), "tokens": (500, 2_000)}
"""The same for the denoisers of other models, which know much before they learn."""
WORTH_SAYING = 2**30
"""From this size on, in bytes, a run says beforehand what the bank takes."""
MOST_SAVED = 2**31
"""The most bytes of banked rows that --server-model span saves without being asked."""


def server_choices(
    options: ServerOptions,
    layout: Layout,
    *,
    rounds: int,
    uploads: int,
    gpu: bool,
    memory: int = 0,
    ranks: int = 1,
    given: Set[str] = frozenset(),
) -> Iterator[Choice]:
    """Yield choices that depend on the model's device and on the generated columns.
    Options that were `given` are kept. `ranks` is the number of ranks that train it,
    `uploads` the largest number of rows in its bank, `memory` the bytes of the smallest
    device; 0: unknown.

    A run that is resumed on another machine keeps the choices of its record.
    """

    def made_for(options: ServerOptions) -> Iterator[Choice]:
        return _choices(options, layout, rounds, uploads, gpu, ranks, given)

    found = list(made_for(options))
    if options.server == "auto" and not _asks_for_p_diff(options, given):
        chosen = options.model_copy(update={one.option: one.value for one in found})
        columns = len(generated(layout, chosen).at)
        why = shortage(chosen, columns, uploads=uploads, ranks=ranks, memory=memory)
        if why:
            because = f"{why}; span does not grow with them"
            yield Choice("server_model", "span", because)
            found = list(made_for(options.model_copy(update={"server_model": "span"})))
    yield from found


def _asks_for_p_diff(options: ServerOptions, given: Set[str]) -> bool:
    """Tell whether the user gave an option that only p-diff has, or a trained model."""
    if options.server_load or "server_model" in given:
        return True
    # A method may add options of its own.
    fields = type(options).model_fields
    return any(P_DIFF in facts_of(fields[name]).needs for name in given)


def _choices(
    options: ServerOptions,
    layout: Layout,
    rounds: int,
    uploads: int,
    gpu: bool,
    ranks: int,
    given: Set[str],
) -> Iterator[Choice]:
    """Yield the choices for this model of rows."""
    if options.server_model == "span" and "server_save" not in given:
        yield from _unsaved(options, layout, uploads)
    if options.server != "auto":
        because = f"as --server {options.server} says"
        yield from _samples(options, options.default_samples, because)
    elif gpu:
        yield from _for_a_gpu(options, ranks, given)
    else:
        yield from _for_a_cpu(options, layout, rounds)


def bank_line(
    options: ServerOptions, layout: Layout, *, uploads: int, ranks: int
) -> str | None:
    """Say what the bank will take on each of the ranks that train the model; None if
    that is little.
    """
    number = 2 if options.bank_precision == "bf16" else 4
    size = number * uploads * len(generated(layout, options).at)
    if options.bank_of == "uploads":
        # Their starts, too.
        size *= 2
    if options.server_model != "p-diff":
        size = -(-size // ranks)
    if size < WORTH_SAYING:
        return None
    where = "host memory" if options.bank_on == "host" else "its device"
    return (
        f"the server's bank of {uploads:,} uploads will take up to {bytes_text(size)} of "
        f"{where} on each rank that learns"
    )


def _for_a_gpu(options: ServerOptions, ranks: int, given: Set[str]) -> Iterator[Choice]:
    learns = _from(options, options.default_samples)
    because = f"it learns on a GPU, {learns}; --server small asks for less"
    yield Choice("server", "paper", because)
    yield from _samples(options, options.default_samples)
    # Not with ZeRO, which would also keep parameters in bfloat16.
    if "server_precision" not in given and not options.zero_stage:
        because = "a GPU is quick with it; --server-precision fp32 asks for more"
        yield Choice("server_precision", "bf16", because)
    # Not if the user gave --server-batch or --server-micro-batch: these are meant for
    # both networks.
    if not any(name.endswith("_batch") for name in given):
        because = "a GPU is quick with it; --denoiser-batch asks for another"
        # Ranks share a batch evenly.
        batch = GPU_BATCH[options.server_model]
        yield Choice("denoiser_batch", -(-batch // ranks) * ranks, because)


def _unsaved(options: ServerOptions, layout: Layout, uploads: int) -> Iterator[Choice]:
    """Yield the choice not to save a model whose file would hold a large bank."""
    size = 4 * uploads * len(generated(layout, options).at)
    if size > MOST_SAVED:
        because = f"server.h5 would hold the bank, {bytes_text(size)}; --server-save asks for it"
        yield Choice("server_save", False, because)


def _for_a_cpu(options: ServerOptions, layout: Layout, rounds: int) -> Iterator[Choice]:
    if options.server_model in START_CPU_SAMPLES:
        fewest, most = START_CPU_SAMPLES[options.server_model]
        samples = {"denoiser": max(fewest, most // num_learnings(options, rounds))}
        because = (
            f"it learns on a CPU, {_from(options, samples)}; --server paper is larger"
        )
        yield Choice("server", "tiny", because)
        yield from _samples(options, samples)
        return
    columns = len(generated(layout, options).at)
    by_default = options.generated_layers is None and len(layout.trained_blocks) > 1
    if by_default and columns > WHOLE_UP_TO:
        because = (
            f"{columns:,} columns of two layers would take a CPU minutes; "
            "--generated-layers asks for more"
        )
        yield Choice("generated_layers", 1, because)
        last = options.model_copy(update={"generated_layers": 1})
        columns = len(generated(layout, last).at)
    samples = affordable_samples(columns, num_learnings(options, rounds))
    because = (
        f"it learns on a CPU, {_from(options, samples)}; --server paper asks for the paper's, "
        "which takes hours here"
    )
    yield Choice("server", "tiny", because)
    yield from _samples(options, samples)


def affordable_samples(columns: int, learnings: int) -> dict[str, int]:
    """Return the number of samples per learning for each network of --server tiny, such
    that all learnings together take half a minute on one core.
    """
    # Measured on one core of an ARM server: a sample of 3,658 columns takes the
    # autoencoder 0.66 ms, one of 10,010 takes 1.6 ms. All latents have the same length.
    seconds = {"autoencoder": 1e-4 + 1.55e-7 * columns, "denoiser": 5e-4}
    samples = {}
    for network, each in seconds.items():
        fewest, most = CPU_SAMPLES[network]
        affordable = SECONDS[network] / learnings / each
        whole = int(affordable) // 1_000 * 1_000
        samples[network] = min(max(whole, fewest), most)
    return samples


def _from(options: ServerOptions, samples: Mapping[str, int]) -> str:
    each = []
    for network in options.networks:
        given: int | None = getattr(options, f"{network}_samples")
        each.append(f"{given or samples[network]:,}")
    return f"from {' and '.join(each)} samples"


def _samples(
    options: ServerOptions, samples: Mapping[str, int], because: str = ""
) -> Iterator[Choice]:
    """Yield the numbers of samples, so that the record holds them even for defaults."""
    for network in options.networks:
        number = samples[network]
        name = f"{network}_samples"
        if not getattr(options, name):
            others = f"; {flag_of(name)} asks for others"
            yield Choice(name, number, because and because + others)

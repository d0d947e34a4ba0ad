"""Options of the machine: devices, ranks, arithmetic."""

from pathlib import Path
from typing import ClassVar, Literal

from hpcfed.data.brought import is_brought
from hpcfed.errors import UserError, count
from hpcfed.models.hugging_face import is_hugging_face
from hpcfed.options.declare import LEFT_OUT, Need, option
from hpcfed.options.recording import RecordingOptions
from hpcfed.options.run import NewcomerOptions
from hpcfed.options.traits import MethodTraits
from hpcfed.options.units import Seconds
from hpcfed.runtime.launcher import Launch
from hpcfed.runtime.own_kernels import VARIABLE, KernelChoice

DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""Files of NVIDIA's and AMD's drivers."""


class MachineOptions(RecordingOptions, NewcomerOptions):
    title: ClassVar[str] = "machine"

    engine: Literal["auto", "batched", "vmap", "loop"] = option(
        "auto",
        "advance clients together (batched; vmap: by torch.func.vmap) or one by one "
        "(loop); auto: the fastest that the network allows",
        tunable=True,
    )
    text_lengths: int = option(
        8,
        "a step on texts is as long as its longest sample, rounded up to one of this "
        "many lengths, which changes results by rounding alone; 1: always the full "
        "length",
        ge=1,
        le=64,
        changes="time",
        needs=Need(
            "texts (--dataset text:DIR, PATH.jsonl, or tokens of your own)",
            lambda run: is_brought(run.dataset),
        ),
        also="length_buckets group_by_length num_buckets",
    )
    checkpoint_activations: Literal["auto", "on", "off"] = option(
        "auto",
        "blocks of --model hf:DIR compute their activations again in the backward pass, "
        "which takes less memory and a third more arithmetic; auto: if a step of one "
        "client would not fit otherwise",
        changes="time",
        needs=Need("--model hf:DIR", lambda run: is_hugging_face(run.model)),
        also="gradient_checkpointing activation_checkpointing recompute",
    )
    # 0 is an amount: the server has no ranks of its own.
    server_ranks: int = option(
        0,
        "the last N ranks train the server's model and host no clients; 0: all ranks "
        "do both",
        ge=0,
        calibration=LEFT_OUT,
        also="servers num_servers",
        tunable=True,
    )
    device: Literal["auto", "cpu", "cuda", "xpu"] = option(
        "auto",
        "where clients live; cuda: GPUs of NVIDIA, or of AMD, for which torch has the "
        "same name; xpu: of Intel",
        changes="time",
        beside_resume=True,
        also="gpu gpus cuda use_cuda accelerator gpu_id gpu_ids device_id "
        "cuda_device ngpu num_gpus no_cuda",
    )
    kernels: KernelChoice = option(
        "auto",
        "auto: kernels of hpcfed's own, where they run; torch: torch's operators alone, "
        "as on GPUs of other makes, which changes results by rounding alone; the "
        f"variable {VARIABLE}=torch does the same",
        changes="time",
        beside_resume=True,
    )
    # Ranks that share a GPU can use NCCL over sockets if each has its own NCCL_HOSTID.
    backend: Literal["auto", "nccl", "xccl", "gloo"] = option(
        "auto",
        "what ranks communicate through; auto: NCCL where every rank has its own GPU "
        "(xccl: for Intel's), else gloo; nccl also works on a shared GPU, but slowly",
        changes="time",
        beside_resume=True,
        also="dist_backend",
    )
    # 0 means "never", not "unset".
    stall_timeout: float = option(
        3600.0,
        "seconds in one phase after which a rank considers the run hung and ends it; "
        "ten times that while the server trains; 0: never",
        ge=0,
    )
    precision: Literal["bf16", "tf32", "fp32", "fp64"] = option(
        "tf32",
        "arithmetic; tf32 multiplies numbers of 10 bits (clients' convolutions: "
        "halves, which also have 10) and is float32 on devices without it; bf16 is "
        "for clients that a GPU trains one by one, or that share a frozen network "
        "(--lora), others then use tf32; rows are float32 in all three",
        also="dtype amp fp16 bf16 half mixed_precision",
        tunable=True,
    )
    placement: Literal["steps", "measured"] = option(
        "measured",
        "how clients are placed on ranks: by their steps, or (measured) by steps at "
        "first and again when the ranks' measured times differ; with --snapshot-every "
        "or --deterministic they stay where they are",
        tunable=True,
    )
    deterministic: bool = option(
        False,
        "bit-identical repeats: deterministic kernels, sums in client order",
        also="reproducible",
        tunable=True,
    )
    simulate_training: Seconds = option(
        None,
        "for tests of the harness, as in 20ms: every rank waits this long instead of "
        "training locally, and rows change by a known amount; no figure of a method "
        "follows from it",
        ge=0,
    )

    @property
    def expects_gpu(self) -> bool:
        """Whether clients will probably be on a GPU."""
        # Asking torch would load it; the drivers' device files say enough.
        return self.device != "cpu" and any(map(Path.exists, DRIVERS))

    @property
    def movable(self) -> bool:
        """Whether clients may change ranks during the run."""
        # A rank's snapshot file holds a fixed set of clients, and a deterministic run
        # must not depend on measured times.
        pinned = self.snapshot_every > 0 or self.deterministic
        return self.placement == "measured" and not pinned


def check_server_ranks(
    config: MachineOptions, method: MethodTraits, launch: Launch
) -> None:
    """Refuse server ranks if the server has no model, or if no worker is left."""
    servers = config.server_ranks
    if servers and not method.has_server:
        raise UserError(
            f"--server-ranks {servers}, but method {config.method} has no model on the "
            "server"
        )
    if servers and servers >= launch.size:
        raise UserError(
            f"--server-ranks {servers} leaves no worker among "
            f"{count(launch.size, 'rank')}; start more, as in mpirun -n {servers + 1}"
        )


def check_waiting(config: MachineOptions) -> None:
    """Refuse --simulate-training with several seeds: they would share one wait."""
    if config.simulate_training is not None and config.seeds is not None:
        raise UserError(
            "--simulate-training waits for one seed; use --seed, not --seeds"
        )


def check_workers(config: MachineOptions, launch: Launch) -> None:
    """Refuse ranks that would host no client."""
    workers = launch.size - config.server_ranks
    _check_hosted("--clients", config.clients, workers)
    if config.new_clients:
        _check_hosted("--new-clients", config.new_clients, workers)


def _check_hosted(flag: str, clients: int, workers: int) -> None:
    if clients < workers:
        raise UserError(
            f"{flag} {clients} on {workers} ranks; use {flag} {workers} or more, or "
            "fewer ranks"
        )

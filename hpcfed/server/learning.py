"""One learning of the server's model: trains its networks and reports what that took."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from hpcfed.errors import Halted
from hpcfed.runtime import accelerator, process_group
from hpcfed.runtime.accelerator import noting_peaks
from hpcfed.runtime.device import peak_memory
from hpcfed.runtime.timer import observer
from hpcfed.server.engines import make_trainer, recomputing
from hpcfed.server.half_learnt import Fitting, HalfLearnt, Ready, TrainingCost
from hpcfed.server.losses import check_losses
from hpcfed.server.networks import ServerNetwork, num_parameters
from hpcfed.server.options import ServerOptions, batching
from hpcfed.server.report import LearningReport, peak_flops
from hpcfed.server.schedule import num_steps
from hpcfed.server.trainer import Loss, StepProgress, Trainer
from hpcfed.server.training_plan import RankSlot, TrainingPlan
from hpcfed.server.zero_memory import promised_memory

LARGE = 10_000_000
"""Number of parameters from which garbage collection is worth its fifth of a second."""

Progress = Callable[[str, int, int, Tensor], None]
"""Called after every step with the network, steps done, all steps, and the losses so
far, which are on the device.
"""
N = TypeVar("N", bound=ServerNetwork)


class LearningRun:
    """A learning in progress, and its report."""

    def __init__(
        self,
        options: ServerOptions,
        slot: RankSlot,
        progress: Progress,
        half: HalfLearnt,
        *,
        rows: int,
    ) -> None:
        """Begin to learn from this number of rows, or go on where an earlier run was
        stopped.
        """
        self.half = half
        self._options = options
        self._slot = slot
        self._progress = progress
        self._steps = num_steps(options)
        self._began = self._clock()
        self.report = LearningReport(
            rows=rows, ranks=slot.size, peak_flops=peak_flops(slot.device, options)
        )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time within as this phase."""
        begin, saving = self._clock(), self.half.saving
        with observer().span(name):
            yield
        saving = self.half.saving - saving
        self.report.seconds[name] = self._clock() - begin - saving

    def fit(
        self, owner: object, name: str, build: Callable[[], ServerNetwork], loss: Loss
    ) -> None:
        """Train the owner's network of this name, and record its cost. Replace it by a
        plain one with what it has learnt; `build` makes one of the same shape.
        """
        self._count_work(name, getattr(owner, name))
        found = self.half.ready(name)
        if found is None:
            self._train(owner, name, build, loss)
        else:
            with self.half.restoring():
                rebuilt = rebuilt_with(dict(found.tensors()), build)
            setattr(owner, name, rebuilt.to(self._slot.device))
            self._note(name, found.losses, found.figures)
            self.report.earlier += found.figures.seconds
        report = self.report
        figures = TrainingCost(report.seconds[name], report.training_memory[name])
        ready = Ready(getattr(owner, name).state_dict, report.losses[name], figures)
        self.half.note_ready(name, ready)

    def _count_work(self, name: str, network: ServerNetwork) -> None:
        """Note what the training of a network takes in all."""
        report, options, ranks = self.report, self._options, self._slot.size
        parameters = num_parameters(network)
        report.parameters[name] = parameters
        report.promised[name] = vars(promised_memory(parameters, options, ranks))
        samples = self._steps[name] * batching(options, ranks, name).batch
        report.samples[name] = samples
        # A backward pass takes twice the FLOPs of a forward pass.
        report.flops[name] = 3.0 * network.flops() * samples

    def _note(self, name: str, losses: np.ndarray, figures: TrainingCost) -> None:
        self.report.losses[name] = losses
        self.report.seconds[name] = figures.seconds
        self.report.training_memory[name] = figures.memory

    def _train(
        self, owner: object, name: str, build: Callable[[], ServerNetwork], loss: Loss
    ) -> None:
        report, options = self.report, self._options
        network: ServerNetwork = getattr(owner, name)
        before = self._held_beside(network)
        device, peaks = self._slot.device, []
        # From before the engine is built, which may take more than a step.
        with noting_peaks(lambda: peaks.append(peak_memory(device))):
            trainer = self._trainer(name, network)
            with self.phase(name):
                losses, earlier = self._fitted(name, trainer, loss)
        check_losses(name, losses, options)
        peak = max([*peaks, peak_memory(device)])
        report.peak_here = max(report.peak_here, peak)
        seconds = report.seconds[name] + earlier
        report.earlier += earlier
        self._note(name, losses, TrainingCost(seconds, peak - before))
        rebuilt = rebuilt_with(self._trained_tensors(trainer), build)
        setattr(owner, name, rebuilt)
        trainer.close()
        # Garbage collection only works without references to trainer and network here.
        del trainer, network
        large = report.parameters[name] >= LARGE
        on_gpu = accelerator.is_gpu(self._slot.device)
        if large or on_gpu or options.zero_stage:
            # DeepSpeed's objects form reference cycles, which hold moments and captured
            # passes.
            gc.collect()
        rebuilt.to(self._slot.device)

    def finish(self) -> LearningReport:
        """Return the report. The remaining time went into building networks and
        engines, and into saving.
        """
        counted = sum(self.report.seconds.values()) - self.report.earlier
        self.half.end()
        self.report.seconds["prepare"] = self._clock() - self._began - counted
        return self.report

    def _trainer(self, name: str, network: ServerNetwork) -> Trainer:
        if self._options.server_checkpointing:
            network.checkpoint = recomputing(self._options)
        plan = TrainingPlan(
            options=self._options,
            batching=batching(self._options, self._slot.size, name),
            slot=self._slot,
            steps=self._steps[name],
        )
        return make_trainer(network, plan)

    def _held_beside(self, network: ServerNetwork) -> float:
        """Return the bytes on the device that do not belong to the network, and begin to
        measure the peak anew; NaN without a GPU.
        """
        device = self._slot.device
        # DeepSpeed would reset the peak, too.
        self.report.note_peak(device)
        if not accelerator.is_gpu(device):
            return float("nan")
        accelerator.forget_peak(device)
        tensors = network.state_dict().values()
        own = sum(tensor.nbytes for tensor in tensors if tensor.device == device)
        return accelerator.allocated_memory(device) - own

    def _trained_tensors(self, trainer: Trainer) -> dict[str, Tensor]:
        """Return the trained network's tensors.

        ZeRO gathers whole tensors in addition to what it holds. Keep them on the host
        until ZeRO has freed its own.
        """
        tensors = {}
        for name, tensor in trainer.tensors():
            tensors[name] = tensor.cpu() if self._options.zero_stage else tensor
        return tensors

    def _fitted(
        self, name: str, trainer: Trainer, loss: Loss
    ) -> tuple[np.ndarray, float]:
        """Make the steps that are left. Return the losses of all steps, and the seconds
        of those that an earlier run has made.
        """
        steps, begun = self._steps[name], self.half.begun(name)
        done, earlier, seconds = 0, np.zeros(0), 0.0
        if begun is not None:
            done, earlier, seconds = begun.done, begun.losses, begun.seconds
            with self.half.restoring():
                trainer.resume(done, begun.state)
            self.half.close()
        begin, saving = self._clock(), self.half.saving

        def taken() -> float:
            return seconds + self._clock() - begin - (self.half.saving - saving)

        def losses_of(done: int, losses: Tensor) -> np.ndarray:
            here = losses[len(earlier) : done] / self._slot.size
            if self._slot.size > 1:
                process_group.allreduce(here)
            return np.concatenate([earlier, here.double().cpu().numpy()])

        training = Fitting(
            name, trainer, steps, self.report.parameters[name], losses_of, taken
        )
        self.half.begin(done)
        try:
            losses = trainer.fit(loss, steps - done, self._observed(training))
        except Halted:
            trainer.close()
            raise
        return np.concatenate([earlier, losses]), seconds

    def _observed(self, training: Fitting) -> StepProgress:
        """Return a callback that reports each step to progress lines and to a
        profile, and saves the learning now and then.
        """
        watch = observer()
        name, steps = training.network, training.steps

        def tell(done: int, losses: Tensor) -> None:
            self._progress(name, done, steps, losses)
            watch.step(name, done, steps)
            self.half.after_step(training, done, losses)

        return tell

    def _clock(self) -> float:
        accelerator.synchronize(self._slot.device)
        return time.perf_counter()


def rebuilt_with(tensors: dict[str, Tensor], build: Callable[[], N]) -> N:
    """Return a new network with these tensors."""
    # On the meta device: initial weights would cost time and memory, and advance the
    # global random stream.
    with torch.device("meta"):
        network = build()
    network.load_state_dict(tensors, assign=True)
    return network.eval()

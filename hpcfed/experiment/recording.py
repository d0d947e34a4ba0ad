"""What a run records: its results on the root, snapshots of rows on every rank."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import ceil, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hpcfed import plugins
from hpcfed.clients import initial
from hpcfed.clients.balance import MAX_RELOCATIONS
from hpcfed.errors import one_line
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.evaluate import AfterTraining, Evaluation
from hpcfed.experiment.progress import RunProgress
from hpcfed.experiment.tracking import Tracking
from hpcfed.federation.channel.accountant import guarantee, noise_multiplier_of
from hpcfed.federation.log import OnTrained, RoundLog
from hpcfed.options import RunConfig
from hpcfed.options.channel import channel_line
from hpcfed.results import series
from hpcfed.results.results import ResultsWriter
from hpcfed.results.server import ServerSize
from hpcfed.results.snapshots import SnapshotWriter
from hpcfed.runtime import environment
from hpcfed.runtime.device import peak_memory
from hpcfed.runtime.timer import PHASES
from hpcfed.server.options import server_options
from hpcfed.server.schedule import num_learnings, num_steps


class Recorder:
    """Records the rounds of one run, on every rank; only the root has `results`."""

    def __init__(
        self,
        setup: Setup,
        results: ResultsWriter | None,
        snapshots: SnapshotWriter | None,
        progress: RunProgress,
        tracking: Tracking | None,
        first: int,
    ) -> None:
        """`first` is the first round; the same call on every rank."""
        self._setup = setup
        self._results = results
        self._snapshots = snapshots
        self._progress = progress
        self._tracking = tracking
        self._bytes_counted = 0
        """Payload of collectives that is already recorded with earlier rounds."""
        self._samples_counted = setup.engine.samples
        """Samples of the engine's steps that earlier rounds have recorded."""
        if snapshots is not None:
            snapshots.begin(first, setup.collectives.barrier)

    def on_trained(
        self, round: int, trained: AfterTraining | None = None
    ) -> OnTrained | None:
        """Return a function that takes the rows after local training. It judges them if
        the round is evaluated, and writes them to the snapshot if there is one.
        """
        snapshots = self._snapshots
        if snapshots is None or not snapshots.due(round):
            return trained

        def take(here: np.ndarray, rows: Tensor) -> None:
            with self._setup.timer.phase("record"):
                snapshots.write_rows(round, here, rows.cpu().numpy())
            if trained is not None:
                trained(here, rows)

        return take

    def close_snapshot(self, round: int, state: Any) -> None:
        """Complete the round's snapshot, if it has one, with the global model."""
        snapshots = self._snapshots
        if snapshots is None or not snapshots.due(round):
            return
        # Rows were written while the method ran; the new global model exists only now.
        with self._setup.timer.phase("record"):
            row = self._setup.method.global_row(state)
            global_row = None if row is None else row.cpu().numpy()
            snapshots.close_round(round, global_row)

    def record(
        self, round: int, log: RoundLog, evaluation: Evaluation | None
    ) -> np.ndarray | None:
        """End the round's timing, gather the ranks' figures and record them.

        Return every rank's train seconds on the root, None elsewhere.
        """
        setup, results = self._setup, self._results
        together = setup.collectives.meet()
        # Waits for the device: the round's events are read here, and nowhere earlier.
        phases, wall = setup.timer.lap()
        # From here on, time counts for the next round.
        with setup.timer.phase("record"):
            report = log.server_report
            memory = [peak_memory(setup.world.device)]
            if report is not None and not setup.world.server_ranks:
                # This process has also trained the server's model, and DeepSpeed may
                # have reset torch's peak.
                memory.append(report.peak_here)
            figures = {
                "wall": wall,
                "cpu_seconds": setup.timer.on_cores,
                "peak_memory": max(memory),
                "wire": self._bytes_since(),
                "halvings": setup.engine.halvings,
                "engine_samples": self._samples_since(),
                "train_seconds": phases[PHASES.index("train")],
                **_log_figures(setup, log),
                **_evaluation_figures(evaluation),
            }
            # One small gather for everything: a collective costs more than its bytes.
            vector = series.as_vector(figures)
            gathered = setup.collectives.gather_vectors(
                np.concatenate([vector, phases])
            )
            if results is None or gathered is None:
                return None
            # Figures first, phases behind them, as concatenated above.
            everyones = series.by_rank(gathered[:, : len(vector)])
            values = series.round_figures(everyones)
            accuracy: np.ndarray | None = None
            more: dict[str, Any] = {"times": log.times}
            if evaluation is not None:
                accuracy = evaluation.client_accuracy
                # All ranks know these, so they need not be gathered.
                values |= evaluation.metrics
                more["client_metrics"] = evaluation.client_metrics
                more["class_accuracy"] = evaluation.class_accuracy
            on_disk = results.write_round(
                round,
                values,
                client_accuracy=accuracy,
                rank_values={name: everyones[name] for name in series.RANK_SERIES},
                phases=gathered[:, len(vector) :],
                together=together,
                **more,
            )
            if report is not None:
                after = round if report.after is None else report.after
                results.write_server(after, report)
            if log.rows_use is not None:
                results.write_use(log.rows_use)
            if self._tracking is not None:
                self._tracking.after_round()
            self._progress.round(round, values, on_disk=on_disk)
            return everyones["train_seconds"]

    def _bytes_since(self) -> int:
        """Return the payload handed to collectives since the last call."""
        # The first round also includes what was sent to set the run up.
        total = self._setup.collectives.bytes_sent
        since = total - self._bytes_counted
        self._bytes_counted = total
        return since

    def _samples_since(self) -> int:
        """Return the samples of all steps that the engine has taken since the last
        call. Runs that share the engine also share the time between the calls.
        """
        total = self._setup.engine.samples
        since = total - self._samples_counted
        self._samples_counted = total
        return since


def _log_figures(setup: Setup, log: RoundLog) -> dict[str, float]:
    """Return this rank's figures from the round's log.

    A number in the log that the table of series names is recorded as it is. So is
    whatever a method or a part of the channel has `measured`: a new figure needs no
    change here. Reading it waits for the device.
    """
    figures = {}
    for name, value in vars(log).items():
        if name in series.KNOWN and isinstance(value, int | float | Tensor):
            figures[name] = float(value)
    for name, value in log.measured.items():
        figures[name] = float(value)
    # What all clients send is known on every rank, so only the root counts it.
    of_all_ranks = log.bytes_up if setup.world.is_root else 0
    figures["bytes_up"] = int(log.bytes_up_here) + of_all_ranks
    figures["excluded"] = len(log.excluded)
    figures["loss_sum"], figures["samples_seen"] = log.summed_losses()
    figures["longest_steps"] = log.longest_steps
    if log.update_norms is not None:
        figures |= norm_figures(log.update_norms.cpu().numpy())
    if log.arrived is not None:
        figures["arrived"] = len(log.arrived)
    if log.selected is not None:
        attackers = np.isin(log.selected, setup.dealt.attackers)
        figures["kept"] = len(log.selected)
        figures["kept_attackers"] = int(attackers.sum())
    return figures


def norm_figures(norms: np.ndarray) -> dict[str, float]:
    """Return the sum, the number and the largest of the norms of a rank's updates;
    updates that are not finite are left out.
    """
    finite = norms[np.isfinite(norms)].astype(np.float64)
    largest = finite.max() if len(finite) else float("nan")
    return {
        "update_norm_sum": finite.sum(),
        "num_updates": len(finite),
        "update_norm_max": largest,
    }


def _evaluation_figures(evaluation: Evaluation | None) -> dict[str, float]:
    if evaluation is None:
        return {}
    return {name: getattr(evaluation, name) for name in series.EVALUATION_SERIES}


def open_results(setup: Setup, folder: Path) -> ResultsWriter:
    """Open run.h5 on the root, with everything that is known before the first round."""
    config, world = setup.settings.config, setup.world
    layout = setup.federation.layout
    task = setup.global_test.task
    return ResultsWriter(
        folder,
        settings=setup.settings.flat(),
        environment=environment.capture(
            locations=world.locations,
            backend=world.backend,
            reason=world.reason,
            launcher=world.launch.launcher,
            threads=setup.threads,
            files=_files(config),
            command=setup.settings.command,
        ),
        clients={**vars(setup.clients), **_client_facts(setup)},
        ranks=world.num_workers,
        facts={
            # A user's file is named by its stem here; the config has the whole path.
            "method": plugins.label(config.method),
            "dataset": plugins.label(config.dataset),
            "model": plugins.label(config.network()),
            "columns": layout.num_columns,
            "parameters": layout.num_parameters,
            "engine": setup.engine.mode,
            "stacked_seeds": setup.stacked,
            "validation_samples": len(setup.dealt.partition.validation),
            "leaked_samples": setup.dealt.supplement.leaked,
            **fingerprints(setup),
            "uploads": channel_line(config, setup.settings.options),
            **_privacy(config),
            # Older files have no task: all of them are classification.
            **({} if task == "classification" else {"task": task}),
            **_generated(setup),
        },
        relocations=0 if setup.shards is None else MAX_RELOCATIONS,
        server=_server_size(setup),
        finals=setup.method.FINALS,
        figures=setup.method.FIGURES,
        metrics=setup.metrics,
        classes=setup.num_outputs,
        evaluated=setup.evaluated if config.evaluate_clients else None,
        members=_most_members(config),
        resumed=config.resume is not None,
    )


def _most_members(config: RunConfig) -> int:
    """Return the most clients of a round on the virtual clock; 0 without one."""
    if config.devices == "none":
        return 0
    invited = config.num_invited
    if config.sampling == "poisson":
        # Ten standard deviations more: a larger round is practically impossible.
        return min(config.clients, ceil(invited + 10 * sqrt(invited)))
    return invited


def fingerprints(setup: Setup) -> dict[str, str]:
    """Return checksums of what a run must go on with."""
    base = {} if setup.base is None else {"base": setup.base.weights}
    return {"data": setup.data, **base}


def _privacy(config: RunConfig) -> dict[str, str | float]:
    """Return the noise of a private run, and what its ε means."""
    if config.sample_noise is not None:
        found: dict[str, str | float] = {
            "noise_multiplier": config.sample_noise,
            "privacy": guarantee(config),
        }
        return found if config.delta is None else found | {"delta": config.delta}
    if config.privacy == "none":
        return {}
    facts: dict[str, str | float] = {
        "noise_multiplier": noise_multiplier_of(config),
        "privacy": guarantee(config),
    }
    if not config.clips_alone:
        facts["delta"] = config.accounted_delta
    return facts


def _files(config: RunConfig) -> dict[str, str]:
    """Return the checksums of all user files that influence the figures."""
    files = plugins.checksums([config.method, config.network(), config.dataset])
    if config.init is not None:
        files |= initial.checksum(config.init, config.first_weights or config.init)
    if config.trace is not None:
        with open(config.trace, "rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        files[str(config.trace)] = checksum
    return files


def _client_facts(setup: Setup) -> dict[str, np.ndarray]:
    """Return which client has which classes. If the run is about it, also return what
    clients got of the validation set, who is malicious, and whose samples they have.
    """
    config, dealt = setup.settings.config, setup.dealt
    facts = {}
    if setup.class_counts is not None:
        facts["classes"] = setup.class_counts
    if config.supplement:
        facts["supplement_samples"] = dealt.supplement.samples
    if config.attack != "none":
        malicious = np.isin(np.arange(config.clients), dealt.attackers)
        facts["attacker"] = malicious.astype(np.int64)
    devices = setup.federation.channel.devices
    if devices is not None:
        for name in ("speed", "downlink", "uplink"):
            facts[name] = getattr(devices, name)
    if dealt.owners is not None:
        facts["owner"] = dealt.owners[: config.clients]
    return facts


def _generated(setup: Setup) -> dict[str, int]:
    """Return how many columns the server's model generates, if there is one."""
    if server_options(setup.settings) is None:
        return {}
    return {"generated_columns": len(setup.federation.generated)}


def _server_size(setup: Setup) -> ServerSize | None:
    """Return how much the run will record about its server's model."""
    options = server_options(setup.settings)
    config = setup.settings.config
    if options is None:
        return None
    times = num_learnings(options, config.rounds)
    ranks = setup.world.server_ranks or setup.world.role_size
    overlaps = options.server_overlap > 0
    return ServerSize(times, ranks, num_steps(options), overlaps)


def open_snapshots(setup: Setup, folder: Path) -> SnapshotWriter | None:
    """Make this rank's writer of snapshots, if the run takes any."""
    config, fed = setup.settings.config, setup.federation
    if not config.snapshot_every:
        return None
    every = config.snapshot_every
    rounds = np.arange(every - 1, config.rounds, every)
    return SnapshotWriter(
        folder,
        setup.world.role_rank,
        clients=fed.clients,
        layout=fed.layout,
        rounds=rounds,
        dtype=np.dtype("f8" if config.precision == "fp64" else "f4"),
        root=setup.world.is_root,
    )


@contextmanager
def closing(
    results: ResultsWriter | None, snapshots: SnapshotWriter | None
) -> Iterator[None]:
    """Mark the run as failed if it fails within the block; always close its files."""
    try:
        yield
    except BaseException as error:
        if results is not None:
            # A full disk may be what failed; the rounds that were published stay.
            with suppress(OSError):
                # KeyboardInterrupt and SystemExit, too: no run stays `running` that has
                # ended.
                results.finish("failed", error=one_line(error))
        raise
    finally:
        if snapshots is not None:
            snapshots.close()

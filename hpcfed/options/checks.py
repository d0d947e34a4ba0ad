"""All checks of settings that can be made before MPI or a device starts."""

from math import prod
from typing import Any

from hpcfed.data import DatasetInfo
from hpcfed.errors import UserError
from hpcfed.options.adapters import check_adapters
from hpcfed.options.aggregation import check_aggregation
from hpcfed.options.compression import check_compression
from hpcfed.options.data import check_data
from hpcfed.options.declare import OptionGroup, facts_of, flag_of, means_off
from hpcfed.options.devices import check_devices
from hpcfed.options.first_weights import check_first_weights
from hpcfed.options.machine import check_server_ranks, check_waiting, check_workers
from hpcfed.options.malicious import check_flip, check_malicious
from hpcfed.options.metrics import METRICS, fitting
from hpcfed.options.partition import check_partition
from hpcfed.options.privacy import check_privacy, check_weights
from hpcfed.options.recording import check_recording
from hpcfed.options.run import NEWCOMERS, check_newcomers, check_run
from hpcfed.options.runconfig import RunConfig
from hpcfed.options.settings import Settings
from hpcfed.options.training import check_optimiser, check_plain_sgd, check_training
from hpcfed.runtime import machine
from hpcfed.runtime.launcher import Launch


def check(settings: Settings, launch: Launch) -> None:
    """Refuse settings that cannot start a run, or that would not do what was asked.

    Later checks rely on earlier ones: the data set is known before its classes are
    counted, and the network before its layers are.
    """
    config, method = settings.config, settings.options
    check_data(config)
    check_partition(config)
    check_training(config)
    check_optimiser(config, method)
    check_recording(config)
    check_run(config, method)
    check_first_weights(config)
    check_adapters(config, config.first_weights)
    check_newcomers(config, method)
    check_results(config)
    check_synthetic(config, max(1, launch.size - config.server_ranks))
    check_malicious(config, method)
    check_flip(config, config.dataset, config.data())
    check_task(config)
    check_devices(config, method)
    check_compression(config, method)
    # After the attack's own check: "unknown attack" says more than "changes nothing".
    check_switches(settings)
    check_aggregation(config, method)
    check_privacy(config, method)
    check_weights(config, method)
    if config.sample_noise is not None:
        check_plain_sgd(config, "--sample-noise")
        if config.supplement:
            raise UserError(
                "--sample-noise would not hold with --supplement, which gives one sample "
                "to several clients"
            )
        if config.data().task != "classification":
            raise UserError(
                f"--sample-noise is for classes, and {config.dataset} is for "
                f"{config.data().task}"
            )
    check_server_ranks(config, method, launch)
    check_workers(config, launch)
    check_waiting(config)
    # Without server ranks, all ranks train the server's model.
    method.check_ranks(config.server_ranks or launch.size)
    method.check(config)


def check_switches(settings: Settings) -> None:
    """Refuse options that the user gave but that would have no effect."""
    given = settings.flat()
    for option, wanted in idle(settings).items():
        if option in settings.asked:
            flag = flag_of(option)
            # The message shows the flag as the user typed it.
            if given.get(option) is False:
                flag = flag.replace("--", "--no-", 1)
            raise UserError(f"{flag} changes nothing without {wanted}")


def idle(settings: Settings) -> dict[str, str]:
    """Find options that would have no effect, and what each of them needs.

    A value that means off, such as `--new-classes 0`, needs nothing.
    """
    run = AllOptions(settings.config, settings.options)
    fields = settings.fields()
    found = {}
    for option, field in fields.items():
        for need in facts_of(field).needs:
            if not need.met(run):
                found[option] = need.text(run)
    # What a method decides by code, because a fact beside the option could not say it.
    for option, wanted, on in settings.options.switches(settings.config):
        if not on:
            found[option] = wanted
    found |= _replaced(settings)
    return {
        option: wanted
        for option, wanted in found.items()
        if not means_off(fields[option], getattr(run, option))
    }


class AllOptions:
    """The options of a run and of its method, as attributes of one object."""

    def __init__(self, *groups: OptionGroup) -> None:
        self._groups = groups

    def __getattr__(self, name: str) -> Any:
        # The order does not matter: `methods.load` refuses a name that is in both.
        for group in self._groups:
            if hasattr(group, name):
                return getattr(group, name)
        raise AttributeError(name)


def _replaced(settings: Settings) -> dict[str, str]:
    """Find options of local training that the method replaces by its own."""
    config = settings.config
    found = {}
    # Newcomers train by the options of every run, even if the method has its own.
    if config.new_clients == 0:
        for name, replacement in settings.options.replaced().items():
            # Here the batch size still acts: it is the default of --supplement-below.
            if (
                name == "batch_size"
                and config.supplement
                and config.supplement_below is None
            ):
                continue
            reason = f"method {config.method} trains by {flag_of(replacement)}"
            found[name] = f"{NEWCOMERS.wanted}: {reason}"
    return found


def check_task(config: RunConfig) -> None:
    """Refuse options that need an accuracy or a metric which the task does not have."""
    data = config.data()
    _check_metrics(config, data)
    is_for = f"{config.dataset} is for {data.task}"
    if data.task in METRICS["accuracy"].tasks:
        return
    if config.target_accuracy is not None:
        raise UserError(f"--target-accuracy: {is_for}, which has no accuracy")
    if config.new_clients:
        raise UserError(
            f"--new-clients are judged by their accuracy, and {is_for}, which has none"
        )


def _check_metrics(config: RunConfig, data: DatasetInfo) -> None:
    for name in config.metrics or ():
        if data.task not in METRICS[name].tasks:
            raise UserError(
                f"--metrics {name} does not fit {config.dataset}, which is for "
                f"{data.task}; use {', '.join(fitting(data.task))}"
            )
        if name == "top5" and data.classes <= 5:
            raise UserError(
                f"--metrics top5 is always 100 % with {data.classes} classes"
            )


GIB = 2**30


def check_results(config: RunConfig) -> None:
    """Refuse results that would not fit into the memory of the writing rank."""
    # A round's record has four bytes per metric of a client and about a thousand more.
    evaluated = config.evaluate_clients or config.clients
    of_clients = 4 * evaluated * max(1, len(config.metrics or ()))
    rounds = config.rounds * (of_clients + 1000)
    # New clients are evaluated before and after each update, from up to three starts.
    updates = config.new_rounds or config.new_updates + 1
    # Three starts of eight bytes each.
    newcomers = 24 * updates * config.new_clients
    needed, there = (rounds + newcomers) * config.num_seeds, machine.usable()
    if needed > there:
        raise UserError(
            f"--rounds {config.rounds} of --clients {config.clients} would make "
            f"{needed / GIB:,.0f} GiB of results, this machine has {there / GIB:,.0f}"
        )


def check_synthetic(config: RunConfig, workers: int) -> None:
    """Refuse synthetic data that would not fit into the host's memory.

    With a GPU the data is not in host memory, and a full GPU reports that itself.
    """
    if config.dataset != "synthetic" or config.expects_gpu:
        return
    needed, there = synthetic_bytes(config, workers), machine.usable()
    if needed > there:
        raise UserError(
            f"--synthetic-shape {config.synthetic_shape}: a rank would need about "
            f"{needed / GIB:,.0f} GiB, this machine has {there / GIB:,.0f}; use smaller "
            "images, fewer --clients, --train-per-client or --test-per-client"
        )


def synthetic_bytes(config: RunConfig, workers: int) -> int:
    """Return a lower bound on a rank's memory: labels, prototypes, images, mlp rows."""
    pixels = prod(config.shape)
    number = 8 if config.precision == "fp64" else 4
    clients = config.clients + config.new_clients
    samples = clients * (config.train_per_client + config.test_per_client)
    # The global test set has as many samples as the clients' test sets together.
    all_samples = samples + clients * config.test_per_client
    of_rank = -(-all_samples // workers)
    images = of_rank * pixels * number * config.num_seeds
    # Three hashes per pixel generate an image.
    hashes = pixels * 8 * 3
    # Rows before and after training, gradient, momentum; the first layer has 64 units.
    rows = 4 * 64 * pixels * number if config.network() == "mlp" else 0
    prototypes = 2 * config.synthetic_classes * pixels * 4
    labels = 3 * 8 * samples
    return images + hashes + rows + prototypes + labels

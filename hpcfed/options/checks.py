"""Everything that can be known to be wrong before MPI or a device starts."""

from collections.abc import Iterable

from hpcfed.errors import UserError
from hpcfed.options.aggregation import aggregation_switches, check_aggregation
from hpcfed.options.compression import check_compression, compression_switches
from hpcfed.options.data import check_data, data_switches
from hpcfed.options.declare import Switch, flag_of
from hpcfed.options.devices import check_devices, device_switches
from hpcfed.options.machine import check_server_ranks, check_waiting, check_workers
from hpcfed.options.malicious import check_flip, check_malicious, malicious_switches
from hpcfed.options.memory import check_results, check_synthetic
from hpcfed.options.newcomers import check_newcomers, newcomer_switches
from hpcfed.options.optimiser import (
    check_optimiser,
    check_plain_sgd,
    optimiser_switches,
)
from hpcfed.options.partition import check_partition, partition_switches
from hpcfed.options.privacy import check_privacy, privacy_switches
from hpcfed.options.recording import check_recording, recording_switches
from hpcfed.options.run import check_run, run_switches
from hpcfed.options.runconfig import RunConfig
from hpcfed.options.settings import Settings
from hpcfed.options.task import check_task
from hpcfed.options.training import check_training, training_switches
from hpcfed.options.weights import check_weights
from hpcfed.runtime.launcher import Launch


def check(settings: Settings, launch: Launch) -> None:
    """Refuse settings with which a run could not start, or would not do what was asked.

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
    """Refuse options that the user gave and that would have no effect."""
    given = settings.flat()
    for option, wanted in idle(settings).items():
        if option in settings.asked:
            flag = flag_of(option)
            if given.get(option) is False:
                flag = flag.replace("--", "--no-", 1)
            raise UserError(f"{flag} changes nothing without {wanted}")


def idle(settings: Settings) -> dict[str, str]:
    """Find options that would have no effect, and what each of them needs.

    A value that means off, such as `--new-classes 0`, needs nothing.
    """
    fields = {**RunConfig.model_fields, **type(settings.options).model_fields}
    values = {**dict(settings.config), **dict(settings.options)}
    found = {}
    for option, wanted, on in _switches(settings):
        usual, value = fields[option].default, values[option]
        # Defaults such as 0, None and False are values that mean off.
        off = not usual and value == usual
        if not on and not off:
            found[option] = wanted
    return found


def _switches(settings: Settings) -> Iterable[Switch]:
    config, method = settings.config, settings.options
    # Where two speak of one option, `idle` reports the later.
    yield from malicious_switches(config)
    yield from aggregation_switches(config)
    yield from privacy_switches(config)
    yield from device_switches(config)
    yield from compression_switches(config)
    yield from run_switches(config)
    yield from recording_switches(config)
    yield from newcomer_switches(config)
    yield from data_switches(config)
    yield from partition_switches(config)
    yield from method.switches(config)
    yield from optimiser_switches(config)
    yield from training_switches(config, method)

"""The one exception that is the user's to mend, and how exceptions are told."""

import difflib
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

GRACE = 2.0
"""Seconds that the root has to tell a mistake which every rank has found, before the
launcher ends the job.
"""

SYNONYMS = {
    "lr": "learning_rate eta local_lr client_lr step_size learningrate",
    "lr_decay": "decay gamma learning_rate_decay lr_schedule",
    "participation": "cohort cohort_size fraction fraction_fit frac sample_rate sampling_rate join_ratio "
    "clients_per_round client_fraction participation_rate C",
    "epochs": "local_epochs local_ep local_steps num_epochs E",
    "clients": "num_clients n_clients number_of_clients num_users users nodes n N K",
    "rounds": "num_rounds n_rounds number_of_rounds global_rounds comm_rounds communication_rounds global_epochs "
    "iterations T",
    "batch_size": "batch bs batchsize local_bs local_batch_size minibatch b B",
    "dataset": "data data_set dataset_name",
    "data_root": "data_dir data_path datadir dataset_dir data_folder root",
    "out": "output output_dir out_dir outdir outputs save save_dir save_path log_dir logdir folder o",
    "device": "gpu gpus cuda use_cuda accelerator",
    "method": "algorithm algo strategy aggregator m",
    "model": "network arch architecture net backbone",
    "alpha": "heterogeneity beta concentration dirichlet dirichlet_alpha dir_alpha non_iid noniid",
    "partition": "split partitioning partitioner distribution",
    "classes_per_client": "shards shards_per_client num_classes_per_client labels_per_client",
    "weight_decay": "wd l2 l2_reg regularization",
    "clip": "clip_norm grad_clip max_grad_norm gradient_clipping",
    "seed": "random_seed rng_seed manual_seed s",
    "seeds": "repeats num_seeds trials",
    "evaluate_every": "eval_every eval_interval eval_gap test_every eval_freq",
    "checkpoint_every": "checkpoint save_every checkpoint_interval save_freq",
    "snapshot_every": "snapshots snapshot_interval",
    "resume": "continue restart from_checkpoint load_checkpoint",
    "target_accuracy": "target target_acc",
    "stop_at_target": "early_stop early_stopping",
    "attackers": "malicious byzantine num_attackers num_byzantine malicious_clients adversaries f",
    "attack_strength": "strength attack_scale",
    "aggregation": "aggregate defense defence aggregation_rule robust",
    "tolerance": "trim trim_ratio byzantine_fraction",
    "precision": "dtype amp fp16 bf16 half",
    "augment": "augmentation data_augmentation transforms",
    "overwrite": "force exist_ok",
    "validation": "val val_size validation_size",
    "new_clients": "novel_clients unseen_clients num_new_clients",
    "deterministic": "reproducible",
    "server": "server_size",
    "server_ranks": "servers num_servers",
}
"""What other tools and papers call our options, in words between spaces."""


class UserError(Exception):
    """A mistake that the user can mend: shown as one line, without a traceback, with
    exit code 2.
    """


class Diverged(ArithmeticError):
    """Numbers are not finite, and the message says which options to change; a traceback
    would say nothing more.
    """


def tell(error: UserError, rank: int) -> None:
    """One line for a mistake that is mostly found by every rank: others speak only if
    the root had no reason to.
    """
    if rank:
        time.sleep(GRACE)
    where = f"rank {rank}: " if rank else ""
    remark(f"hpcfed: {where}{shortened(printable(str(error)))}")


def remark(text: str) -> None:
    """Writes lines to stderr, if there is still one, without characters that a terminal
    would obey.

    No run ends because its terminal, pipe or log has gone, or is full.
    """
    try:
        print(_safe(text), file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 for all that is said from now on


def say(text: str) -> None:
    """Writes lines to stdout as `remark` does to stderr: for what is told on the way,
    not for what was asked for.
    """
    with unless_full("going on without it"):
        print(_safe(text), flush=True)


@contextmanager
def unless_full(otherwise: str) -> Iterator[None]:
    """Within, stdout may be full: that is a remark and no failure, because what matters
    is on disk.

    A reader who has gone, as in `| head`, is left to the caller.
    """
    try:
        yield
        if sys.stdout is not None:  # as it is where the process was started without one
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is not None:
            raise
        nowhere = open(os.devnull, "w")  # noqa: SIM115 for all that is said from now on
        with suppress(
            OSError, ValueError
        ):  # what stdout still holds is written at the end of the process
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        sys.stdout = nowhere
        remark(f"hpcfed: cannot write to stdout: {error.strerror}; {otherwise}")


def _safe(text: str) -> str:
    return "\n".join(printable(line) for line in text.split("\n"))


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """`unknown method 'fedagv'; did you mean 'fedavg'?`, or the list of what is known
    when nothing is close.
    """
    names = list(known)
    return UserError(
        f"unknown {kind} '{name}'{did_you_mean(name, names) or '; known: ' + ', '.join(names)}"
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'fedavg'?` when something known means the same as the word or is
    spelt nearly so, else nothing.

    A guess that misleads is worse than none: letters in another order are near, others
    must agree in four of five.
    """
    names = {_plain(name): name for name in known}
    plain = _plain(word)
    meant = [
        option
        for option, words in SYNONYMS.items()
        if plain in words.split() or plain.lower() in words.split()
    ]
    shuffled = [name for name in names if sorted(name) == sorted(plain)]
    near = difflib.get_close_matches(plain.lower(), list(names), n=1, cutoff=0.8)
    for name in (*meant, *shuffled, *near):
        if name in names:
            return f"; did you mean '{names[name]}'?"
    return ""


def _plain(word: str) -> str:
    """An option's name without the dashes of its flag."""
    return word.lstrip("-").replace("-", "_")


def one_line(error: BaseException) -> str:
    """What an exception says, for a person, with the notes that were added on its way."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    text = str(error).strip().partition("\n")[0]
    notes = "; ".join(getattr(error, "__notes__", []))
    return f"{type(error).__name__}: {text}" + (f" ({notes})" if notes else "")


def count(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def shortened(text: str) -> str:
    """Cut numbers of more digits than anybody reads."""
    return re.sub(r"[0-9]{50,}", lambda found: f"{found[0][:10]}…", text)


def printable(text: str) -> str:
    """On one line, without characters that a terminal would obey: names may come from a
    file that was handed in.
    """
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for letter in text
    )


def no_checkpoint(folder: object, rounds: int) -> str:
    """Why a run that has come so far cannot be gone on with."""
    return (
        f"--resume {folder}: there is no whole checkpoint, and "
        f"{count(rounds, 'recorded round')} would be lost; "
        "add --overwrite to begin anew"
    )

"""Whatever a user writes: settings, or one line."""

import json
import math
import string
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hpcfed import cli, methods
from hpcfed.cli.settings import run_parser
from hpcfed.errors import UserError, printable
from hpcfed.experiment.serving import check_network, choose_server
from hpcfed.options import (
    RunConfig,
    Settings,
    check,
    check_unchanged,
    facts,
    read_toml,
    resolve,
)
from hpcfed.options.checks import synthetic_bytes
from hpcfed.options.runconfig import with_old_meaning
from hpcfed.runtime import machine
from hpcfed.runtime.launcher import Launch

OPTIONS = {
    name: methods.load(name).Options
    for name in ("fedavg", "pfedgpa", "genefl", "genfed", "fedavg-ft")
}
PLAIN = st.text(
    string.ascii_letters + string.digits + " ._-/:'\"\\\n\t<>é", max_size=12
)
SCALARS = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | PLAIN
    | st.dates()
    | st.times()
)
VALUES = SCALARS | st.lists(SCALARS, max_size=3)


def written(value: Any) -> str:
    """Write a value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    return value.isoformat() if hasattr(value, "isoformat") else repr(value)


def likely(method: str) -> st.SearchStrategy[dict[str, Any]]:
    """Known options with values that are often good, and others."""
    names = sorted(
        {*RunConfig.model_fields, *OPTIONS[method].model_fields} - {"method"}
    )
    good = (
        st.integers(0, 5)
        | st.floats(0, 1)
        | st.sampled_from(["none", "auto", "cpu", "mean", "iid", "0..3", "mlp"])
    )
    keys = st.sampled_from(names) | st.text(
        string.ascii_lowercase + "_-", min_size=1, max_size=8
    )
    return st.dictionaries(keys, good | VALUES, max_size=4)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.sampled_from(sorted(OPTIONS)).flatmap(
        lambda method: st.tuples(st.just(method), likely(method))
    )
)
@example(("fedavg", {"rounds": 10**18, "clients": 10**18}))
@example(("fedavg", {"dataset": "file:\0"}))
@example(("fedavg", {"cohort": 1}))
def test_any_values_are_settings_or_one_line(
    tmp_path: Path, chosen: tuple[str, dict[str, Any]]
) -> None:
    method, values = chosen
    path = tmp_path / "my.toml"
    lines = [f"{json.dumps(name)} = {written(value)}" for name, value in values.items()]
    path.write_text("\n".join([f'method = "{method}"', *lines]))
    try:
        found = cli.parse_run([str(path)])
        check(found, Launch("none", 0, 1))
    except UserError as error:
        assert 0 < len(printable(str(error))) < 10_000
    else:
        assert found.config.rounds * found.config.clients < 2**44, (
            "its results would fill any memory"
        )
        assert_read_back(found)


@given(st.text(max_size=60) | st.binary(max_size=60))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example("a = " + "[" * 5000)
@example("a = 1" + "0" * 5000)
def test_any_file_is_options_or_one_line(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "my.toml"
    path.write_bytes(
        content.encode(errors="surrogatepass") if isinstance(content, str) else content
    )
    try:
        read_toml(path)
    except UserError as error:
        assert str(path) in str(error)


def assert_read_back(found: Settings) -> None:
    """What a run's file keeps of its settings are the same settings."""
    stored = json.loads(json.dumps(found.flat()))
    values = {name: value for name, value in stored.items() if value is not None}
    if found.config.seeds is not None:
        del values["seed"]
    if found.config.cohort is not None:
        del values["participation"]
    again = resolve(values, {name: name for name in values}, type(found.options))
    assert again == found
    assert again.flat() == stored


@pytest.mark.parametrize("method", methods.names())
def test_every_method_reads_its_settings_back(method: str) -> None:
    options = methods.load(method).Options
    assert_read_back(
        resolve(
            {"method": method, "out": "a/b", "alpha": 0.1, "seeds": "1,2"}, {}, options
        )
    )


def checked(*words: str, ranks: int = 1) -> Settings:
    """The settings of a command line that nothing is wrong with."""
    found = cli.parse_run(list(words))
    check(found, Launch("none", 0, ranks))
    return found


@pytest.mark.parametrize("method", methods.names())
@pytest.mark.parametrize(
    "words",
    ["--rounds 1", "--rounds 6", "--clients 3", "--clients 2 --attack label-flip"],
)
def test_no_method_is_refused_for_its_own_defaults(method: str, words: str) -> None:
    """Defaults give way, the settings hold what was chosen, and what was chosen is
    told.
    """
    found = checked("--method", method, *words.split())
    check_network(found)
    assert_read_back(found)
    values = found.flat()
    for choice in found.choices:
        assert values[choice.option] == choice.value
        assert f"--{choice.option.replace('_', '-')}" in str(choice)
    again = Settings(found.config, found.options)
    assert again == found.adapted(()), "what was chosen once is chosen for good"


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        ("--method pfedgpa --rounds 6", "bank_rounds", 6),
        ("--method pfedgpa --rounds 30", "bank_rounds", 20),
        ("--method pfedgpa --diffusion-steps 10", "inversion_depth", 10),
        ("--method pfedgpa --diffusion-steps 10", "guided_start", 10),
        ("--method genefl --clients 3", "clusters", 3),
        ("--method fedbn", "model", "cnn-bn"),
        ("--method fedbn --model resnet18", "model", "resnet18"),
        (
            "--method fedlps --dataset synthetic --synthetic-shape 1x9x9 --model auto",
            "model",
            "cnn-digits",
        ),
        ("--method parfed", "shared_layers", "conv1,conv2"),
        ("--method fedfina --model mlp", "shared_layers", "fc1"),
        ("--method fedlg", "gene_pools", "conv1,conv2/fc1,head"),
        ("--attack ipm --clients 2", "attackers", 1.0),
        ("--attack ipm", "attackers", 0.2),
    ],
)
def test_a_default_that_does_not_suit_the_run_gives_way(
    words: str, option: str, value: Any
) -> None:
    assert checked(*words.split()).flat()[option] == value


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--method pfedgpa --rounds 6 --bank-rounds 20",
            "--bank-rounds 20, but the run has only 6 rounds",
        ),
        (
            "--method genefl --clients 3 --clusters 4",
            "--clusters 4, but there are 3 clients",
        ),
        (
            "--attack ipm --clients 2 --attackers 0.2",
            "--attackers 0.2 of 2 clients round to none",
        ),
        (
            "--method pfedgpa --diffusion-steps 10 --inversion-depth 20",
            "--inversion-depth 20 is beyond",
        ),
    ],
)
def test_what_the_user_gave_does_not_give_way(words: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        checked(*words.split())


def test_ranks_share_the_servers_usual_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcfed.cli.settings.launched", lambda: Launch("mpirun", 0, 4))
    assert checked("--method", "pfedgpa", ranks=4).flat()["server_batch"] == 52
    with pytest.raises(
        UserError, match="--server-batch 50 cannot be shared by 4 server ranks"
    ):
        checked("--method", "pfedgpa", "--server-batch", "50", ranks=4)


def test_the_server_is_chosen_by_its_device_and_the_choice_is_kept() -> None:
    wide = "--dataset synthetic --model cnn-cifar"
    names = ("server", "autoencoder_samples", "denoiser_samples", "generated_layers")
    for words, gpu, expected in (
        ("", False, ("tiny", 16_000, 32_000, None)),
        # Six learnings share the half minute of one.
        ("--rounds 30 --server-every 5", False, ("tiny", 2_000, 5_000, None)),
        # Of 75,146 columns of two layers the last layer alone.
        (wide, False, ("tiny", 16_000, 32_000, 1)),
        (f"{wide} --generated-layers 2", False, ("tiny", 1_000, 32_000, 2)),
        (wide, True, ("paper", 100_000, 400_000, None)),
        ("--server paper", False, ("paper", 100_000, 400_000, None)),
        ("--denoiser-samples 7", False, ("tiny", 16_000, 7, None)),
    ):
        given = checked("--method", "pfedgpa", *words.split())
        found = choose_server(given, gpu=gpu)
        flat = found.flat()
        assert tuple(flat[name] for name in names) == expected
        assert choose_server(found, gpu=not gpu) == found, (
            "a run that goes on elsewhere keeps its server"
        )
        told = " ".join(map(str, found.choices))
        assert ("--server is" in told) == (words != "--server paper")
        check_unchanged(Path("x"), flat, given.flat())
    with pytest.raises(UserError, match="was run with denoiser_samples 80000, not 7"):
        check_unchanged(Path("x"), flat | {"denoiser_samples": 80_000}, given.flat())


def test_older_results_had_the_defaults_of_options_that_came_later() -> None:
    had, folder = {"rounds": 2}, Path("x")
    check_unchanged(folder, had, {"rounds": 2, "devices": "none", "deadline": None})
    with pytest.raises(UserError, match="was run with devices none, not uniform"):
        check_unchanged(folder, had, {"rounds": 2, "devices": "uniform"})


def test_a_server_on_a_gpu_learns_in_large_batches_of_bf16_unless_told() -> None:
    def chosen(*words: str, ranks: int = 1) -> tuple[str, int | None]:
        given = checked("--method", "pfedgpa", *words)
        flat = choose_server(given, gpu=True, ranks=ranks).flat()
        check_unchanged(Path("x"), flat, given.flat())
        return flat["server_precision"], flat["denoiser_batch"]

    assert chosen() == ("bf16", 400)
    assert chosen(ranks=3) == ("bf16", 402), "ranks share a batch evenly"
    assert chosen("--denoiser-batch", "60") == ("bf16", 60)
    assert chosen("--server-batch", "60") == ("bf16", None), "meant for both networks"
    assert chosen("--server-precision", "fp32") == ("fp32", 400)
    assert chosen("--zero-stage", "1") == ("fp32", 400)
    assert chosen("--server", "paper") == ("fp32", None), "the plain option is plain"
    given = checked("--method", "pfedgpa", "--server", "paper").flat()
    with pytest.raises(UserError, match="server_precision bf16, not fp32"):
        check_unchanged(Path("x"), given | {"server_precision": "bf16"}, given)


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ("--partition iid --alpha 0.1", "--partition dirichlet"),
        ("--partition iid --alpha 0.5", "--partition dirichlet"),
        ("--classes-per-client 3", "--partition sharding"),
        ("--uniform-share 0.5", "--partition dominant"),
        ("--train-per-client 50", "--partition dominant or --dataset synthetic"),
        ("--test-per-client 50", "--partition dominant or --dataset synthetic"),
        ("--synthetic-classes 5", "--dataset synthetic"),
        ("--synthetic-shape 1x8x8", "--dataset synthetic"),
        (
            "--method pfedhn --lr 0.3",
            "--new-clients 10: method pfedhn trains by --inner-lr",
        ),
        (
            "--method pfedhn --epochs 3",
            "--new-clients 10: method pfedhn trains by --inner-steps",
        ),
        (
            "--method fedrep --epochs 3",
            "--new-clients 10: method fedrep trains by --body-epochs",
        ),
        ("--method pfedhn --welcome-rounds 3", "--new-clients 10"),
        ("--method pfedhn --inner common --inner-steps 3", "--inner own"),
        ("--method pfedgpa --warm-rows average", "--warm-start"),
        ("--method pfedgpa --guided-noise", "--new-clients 10 and --guided-updates"),
        ("--new-updates 3", "--new-clients 10"),
        ("--join-rounds 3", "--new-clients 10"),
        (
            "--partition iid --test-classes held",
            "--partition dirichlet, sharding or dominant",
        ),
        ("--method genefl --new-rounds 3", "--new-clients 10"),
        (
            "--method genefl --new-clients 4 --new-rounds 3 --new-updates 3",
            "leaving --new-rounds out",
        ),
        ("--attackers 3", "--attack ipm"),
        ("--attack mimic --attack-strength 2", "--attack ipm, sign-flip or noise"),
        ("--tolerance 0.1", "--aggregation trimmed-mean"),
        ("--aggregation krum --krum-keep 2", "--aggregation multi-krum"),
        ("--stop-at-target", "--target-accuracy 80"),
        ("--supplement-share 0.5", "--supplement"),
        ("--rounds 1 --lr-decay 0.9", "--rounds 2 or more"),
        ("--overwrite", "--out"),
        ("--method genfed --schedule-base 0.9", "--schedule power"),
        ("--method genfed --schedule power --schedule-rounds 9", "--schedule linear"),
        ("--method genefl --clusters 1 --basis 3", "--clusters 2 or more"),
        ("--method genefl --lambda2 0 --epsilon 0.1", "a --lambda2 above 0"),
        ("--method genefl --lambda2 0 --elastic high", "a --lambda2 above 0"),
        ("--method genefl --lambda1 0 --smooth layers", "a --lambda1 above 0"),
        ("--method fedumf --umf-beta 0.5", "a --participation below 1"),
        ("--method genfedumf --umf-beta 0.5", "a --participation below 1"),
        ("--method fedau --au-cutoff 5", "a --participation below 1"),
        ("--method pfedgpa --guidance 1", "--new-clients 10 and --guided-updates"),
        (
            "--method pfedgpa --new-clients 2 --bank-of uploads --guided-reference before",
            "--bank-of updates",
        ),
        (
            "--method pfedgpa --inversion-depth 0 --inversion-noise none",
            "an --inversion-depth above 0",
        ),
    ],
)
def test_an_option_that_cannot_act_is_refused(
    words: str, needed: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        checked(*words.split())
    assert str(caught.value).endswith(f" changes nothing without {needed}")
    assert str(caught.value).split()[0] in words
    lines = [word.replace("--", "").replace(" ", "=", 1) for word in words.split(" --")]
    pairs = [line.partition("=")[::2] for line in lines]
    text = "\n".join(
        f"{name} = {json.dumps(value) if value else 'true'}" for name, value in pairs
    )
    (tmp_path / "my.toml").write_text(text)
    with pytest.raises(UserError, match="changes nothing without"):
        checked(str(tmp_path / "my.toml"))


@pytest.mark.parametrize(
    "words",
    [
        "--partition iid",
        "--dataset synthetic --partition iid --train-per-client 50 --synthetic-classes "
        "5 --synthetic-shape 1x8x8",
        "--partition dominant --test-per-client 50 --uniform-share 0.5",
        "--method pfedhn --lr 0.3 --new-clients 10",
        "--method pfedhn --lr 0.3 --inner common",
        "--method pfedhn --batch-size 8 --supplement",
        "--method fedumf --umf-beta 0.5 --participation 0.5",
        "--no-stop-at-target --krum-keep 0 --new-classes 0",
    ],
)
def test_an_option_that_acts_or_means_off_is_not(words: str) -> None:
    checked(*words.split())


NO_ZERO = {
    "target_accuracy", "clip_quantile", "target_epsilon", "delta", "noise_cohort",
    "privacy_population", "denoiser_depth", "guided_within",
}  # fmt: skip
"""Options that nothing decides where they are 0: it is refused."""
ZEROS = {
    "noise_multiplier", "sample_noise", "finetune_epochs", "lr_warmup", "data_seed",
}  # fmt: skip
"""Options for which 0 is a value, although they have no default."""
UNSET_KINDS = (int | None, float | None, int | Literal["mean"] | None)
UNSET = [
    (method, name)
    for method in ("fedavg", "fedavg-ft", "genefl", "pfedhn", "pfedgpa")
    for name, field in {
        **(RunConfig.model_fields if method == "fedavg" else {}),
        **methods.load(method).Options.model_fields,
    }.items()
    if field.annotation in UNSET_KINDS and name not in NO_ZERO | ZEROS
]
"""Options that something else decides where the user does not."""


@pytest.mark.parametrize("method", methods.names())
def test_zero_is_a_value_unless_the_help_says_otherwise(method: str) -> None:
    """Whatever a number's default is: 0 stays 0, or is refused, or the help says that
    something else decides.
    """
    fields = methods.load(method).Options.model_fields
    _, parser = run_parser(fields, method)
    said = {action.dest: action.help or "" for action in parser._actions}
    if method == "fedavg":
        fields = {**RunConfig.model_fields, **fields}
    for name, field in fields.items():
        if field.annotation not in (int, float, *UNSET_KINDS):
            continue
        flag = f"--{name.replace('_', '-')}"
        try:
            found = cli.parse_run(["--method", method, flag, "0"]).flat()[name]
        except UserError:
            continue
        assert (found == 0) != ("as if it were not given" in said[name]), name


@pytest.mark.parametrize(("method", "name"), UNSET)
def test_zero_means_unset_where_something_else_decides(method: str, name: str) -> None:
    usual = cli.parse_run(["--method", method])
    given = cli.parse_run(["--method", method, f"--{name.replace('_', '-')}", "0"])
    assert given == usual
    assert given.flat()[name] is None


def test_records_of_older_versions_have_zero_for_every_unset_option() -> None:
    unset = {name for _, name in UNSET}
    for method in methods.names():
        for name, stated in facts(method).items():
            if stated.zero_was_unset and not stated.zero:
                assert name in unset


def test_a_zero_of_today_stays_one_in_its_record() -> None:
    stored = cli.parse_run(["--method=fedavg-ft", "--finetune-epochs=0"]).flat()
    assert with_old_meaning(stored)["finetune_epochs"] == 0
    older = {**stored, "krum_keep": 0}
    assert with_old_meaning(older)["finetune_epochs"] is None


def test_a_stored_config_holds_all_options_and_is_not_refused_for_those_that_cannot_act() -> (
    None
):
    stored = {
        name: value
        for name, value in cli.parse_run([]).flat().items()
        if value is not None
    }
    options = methods.load("fedavg").Options
    check(
        resolve(stored, {name: name for name in stored}, options, shared=stored),
        Launch("none", 0, 1),
    )
    with pytest.raises(UserError, match="changes nothing without"):
        check(
            resolve(stored, {name: name for name in stored}, options),
            Launch("none", 0, 1),
        )


@pytest.mark.parametrize(
    "words",
    [
        "--synthetic-shape 3x99999x99999",
        "--synthetic-shape 3x99999x99999 --clients 1 --train-per-client 1 --test-per-client 1",
        "--synthetic-shape 3x9999x9999 --clients 1 --train-per-client 1 --test-per-client 1",
        "--train-per-client 1000000000000",
        "--synthetic-classes 1000000000000",
    ],
)
def test_synthetic_data_larger_than_memory_is_refused(words: str) -> None:
    with pytest.raises(
        UserError, match=r"a rank would need about [\d,]+ GiB, this machine has \d"
    ):
        checked(
            "--dataset",
            "synthetic",
            "--partition",
            "iid",
            "--device",
            "cpu",
            *words.split(),
        )


def test_the_estimate_of_synthetic_data_is_what_a_rank_holds() -> None:
    """A rank holds its images and little else; with more ranks each holds less."""
    words = [
        "--dataset",
        "synthetic",
        "--clients",
        "100",
        "--train-per-client",
        "900",
        "--test-per-client",
        "50",
    ]
    config = checked(*words).config
    images = 4 * 3 * 32 * 32 * 100 * (900 + 50 + 50)
    assert images < synthetic_bytes(config, 1) < 1.05 * images
    assert synthetic_bytes(config, 4) < 0.3 * images
    double = checked(*words, "--precision", "fp64", "--seeds", "0..2").config
    assert 6 * images < synthetic_bytes(double, 1) < 6.2 * images


def test_a_job_may_use_what_its_control_group_grants(tmp_path: Path) -> None:
    groups, mounted = tmp_path / "cgroup", tmp_path / "fs"
    whole = machine.usable(groups, mounted)
    assert whole > 2**28, "no control group: the machine's"
    job = mounted / "slurm" / "job"
    job.mkdir(parents=True)
    groups.write_text("0::/slurm/job\n")
    (job / "memory.max").write_text("max\n")
    assert machine.usable(groups, mounted) == whole
    (job.parent / "memory.max").write_text(f"{2**27}\n")
    assert machine.usable(groups, mounted) == 2**27, "the folder above limits it, too"
    old = mounted / "memory" / "slurm"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text(f"{2**26}\n")
    groups.write_text("3:cpu:/other\n4:memory:/slurm\n")
    assert machine.usable(groups, mounted) == 2**26


def test_a_server_of_an_older_record_has_learnt_uploads() -> None:
    older = with_old_meaning({"method": "pfedgpa", "bank_rounds": 20})
    assert older["bank_of"] == "uploads"
    newer = with_old_meaning({"bank_rounds": 20, "bank_of": "updates"})
    assert newer["bank_of"] == "updates"
    assert "bank_of" not in with_old_meaning({"method": "fedavg"})


def test_a_server_that_exceeds_its_device_is_span_unless_told() -> None:
    """The last two layers have 1.6 million columns. At the paper's size the autoencoder
    has over 512 parameters for each, and parameters, gradients and moments take 16 bytes
    each: over 12 GB.
    """
    wide = "--method pfedgpa --dataset synthetic --model cnn-pfl"
    few, many = 2**33, 2**40
    for words, memory, model in (
        (wide, many, "p-diff"),
        (wide, few, "span"),
        (wide, 0, "p-diff"),
        (f"{wide} --generated-layers 1", few, "p-diff"),
        # What only p-diff has, or a size, asks for it; the run is then refused.
        (f"{wide} --server-model p-diff", few, "p-diff"),
        (f"{wide} --input-noise 0", few, "p-diff"),
        (f"{wide} --server paper", few, "p-diff"),
        (f"{wide} --server-model tokens", few, "tokens"),
    ):
        given = checked(*words.split())
        found = choose_server(given, gpu=True, memory=memory)
        assert found.flat()["server_model"] == model, words
        assert choose_server(found, gpu=True, memory=memory) == found
        check_unchanged(Path("x"), found.flat(), given.flat())
        told = [str(one) for one in found.choices if one.option == "server_model"]
        if model == "span":
            assert len(told) == 1 and "columns, and its device has 8.00 GiB" in told[0]
        else:
            assert told == []

"""What the README pages say is so: their commands run or are understood, what they show
is what is printed, their files work, and their links lead somewhere.
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hpcfed
from hpcfed import cli, methods
from hpcfed.cli.settings import all_method_fields, parse_run, run_parser
from hpcfed.options import check
from hpcfed.options.metrics import METRICS
from hpcfed.results.format import AT_THE_END
from hpcfed.results.results import ResultsWriter
from hpcfed.results.series import ROUND_SERIES
from hpcfed.results.server import ServerSize
from hpcfed.results.telemetry import FIGURES as TELEMETRY
from hpcfed.runtime.history import History, Series
from hpcfed.runtime.launcher import launched
from tests.readme_pages import (
    ELISION,
    PAGES,
    ROOT,
    Block,
    Command,
    anchors,
    blocks,
    commands,
    links,
    prose,
    same_but_for_numbers,
    spans,
    spoken_commands,
    table_rows,
)

LANGUAGES = {"bash", "console", "python", "toml", "text"}
START = PAGES[0]
FILES_PAGE = ROOT / "hpcfed/results/README.md"
METHODS_PAGE = ROOT / "hpcfed/methods/README.md"
SHORT = ["--rounds", "2"]
"""What ends every run early whose output no page shows."""
SMALL: dict[str, list[str]] = {
    "genefl": [
        "--rounds", "2", "--clients", "8", "--new-clients", "4", "--new-updates", "11", "--join-rounds", "1",
    ],
    "warmup-cosine": ["--rounds", "3", "--lr-warmup", "2"],
    "--early-stop": ["--rounds", "12"],
    "idlg": ["--steps", "1", "--images", "1"],
    "ResNet": ["--model-options", '{"width": 4, "blocks": 1}', "--clients", "4"],
    "ViT": ["--model-options", '{"width": 8, "depth": 1, "heads": 2}'],
    "text:speeches": ["--model-options", '{"width": 8, "depth": 1, "heads": 2}'],
    "profile": [
        "--rounds", "4", "--bank-rounds", "2", "--autoencoder-samples", "64", "--denoiser-samples", "64",
        "--server-ranks", "0", "--server-engine", "torch", "--diffusion-steps", "20", "--inversion-depth", "5",
        "--model", "mlp", "--server-latent", "4",
    ],
}  # fmt: skip
"""Words that make a command quick that has one of these, and leave its output alike."""
UNDERSTOOD_ONLY = (
    "1000000",  # clients: a minute
    "hf:DIR",
    "hf-data:femnist",
    "--lora",
    "--warm-start",
)
"""Words of commands that need more than a moment, or files of other programs."""
OTHER_PROGRAMS = ("apptainer", "export", "jube", "podman", "reframe")
OTHERS_FLAGS = {
    "--oversubscribe", "--gpus-per-task", "--ntasks", "--mpi", "--kill-on-bad-exit", "--partition", "--quick", "--gpu",
    "--slow", "--wait", "--allow-run-as-root", "--system", "--logdir", "--no-deps",
    "--nv", "--user", "--signal",
}  # fmt: skip
"""Flags of mpirun, srun, sbatch, Apptainer, Podman and of the scripts in launch/."""


def all_blocks(*languages: str) -> list[Block]:
    return [b for page in PAGES for b in blocks(page) if b.language in languages]


def all_commands() -> list[Command]:
    return [c for block in all_blocks("bash", "console") for c in commands(block)]


# The pages themselves


def test_the_page_to_start_from_is_short_and_leads_everywhere() -> None:
    assert len(START.read_text().splitlines()) <= 200
    targets = {
        (START.parent / link.partition("#")[0]).resolve() for link in links(START)
    }
    assert set(PAGES[1:]) <= targets


@pytest.mark.parametrize(
    "page", PAGES[1:], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_page_says_what_it_is_for(page: Path) -> None:
    text = page.read_text()
    title, _, rest = text.partition("\n\n")
    assert title.startswith("# ") and rest.startswith("This page is for ")
    assert "[Back to the start](" in text
    if len(text.splitlines()) > 150:
        contents = {link.removeprefix("#") for link in links(page) if link[0] == "#"}
        headings = re.findall("^## .*", prose(page), re.MULTILINE)
        assert len(headings) <= len(contents), "a long page has contents"


def test_links_lead_somewhere() -> None:
    lost = []
    for page in PAGES:
        for link in links(page):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            found = target.exists() and target.is_relative_to(ROOT)
            if found and anchor:
                found = anchor in anchors(target)
            if not found:
                lost.append(f"{page}: {link}")
    assert lost == []


def test_every_block_is_of_a_language_that_is_tested() -> None:
    for page in PAGES:
        assert {block.language for block in blocks(page)} <= LANGUAGES, page
    # What has been printed once, and takes too long to be printed again.
    for block in all_blocks("text"):
        assert not re.search(r"^(\$ |hpcfed |mpirun )", block.text, re.MULTILINE)


def test_tables_have_as_many_cells_in_every_row() -> None:
    """A bar that is not escaped would cut a cell in two."""
    for page in PAGES:
        for part in prose(page).split("\n\n"):
            rows = list(table_rows(part))
            assert len({len(row) for row in rows}) <= 1, f"{page}: {rows[0]}"


def test_the_tables_of_methods_have_them_all() -> None:
    every = set(methods.names())
    for page in (START, METHODS_PAGE):
        named = set(re.findall("`([a-z-]+)`", _rows_after(page, "| `--method` |")))
        assert every <= named, page


def test_promises_name_tests_that_are_there() -> None:
    promises = (ROOT / "tests/README.md").read_text()
    named = set(re.findall("`(test_[a-z_0-9]+)`", promises))
    assert named
    there = {path.stem for path in (ROOT / "tests").glob("test_*.py")}
    assert named <= there


def test_the_folders_stand_in_the_order_of_their_imports() -> None:
    folders = _rows_after(ROOT / "hpcfed/README.md", "| folder |")
    names = re.findall("^\\| \\[?`([a-z./]+)`", folders, re.MULTILINE)
    told = [name.rstrip("/").removesuffix(".py") for name in names]
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    layers = tools["importlinter"]["contracts"][0]["layers"]
    # Folders of one layer may stand in any order.
    place = {name: at for at, layer in enumerate(layers) for name in layer.split(" | ")}
    assert set(told) == set(place)
    places = [place[name] for name in told]
    assert places == sorted(places)


def _rows_after(page: Path, head: str) -> str:
    """Return a table of a page by the beginning of its head."""
    return page.read_text().partition(head)[2].partition("\n\n")[0]


# Commands


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder: what the pages name lies in it."""
    folder = tmp_path_factory.mktemp("user")
    for name in ("benchmarks", "launch", "slurm"):
        (folder / name).symlink_to(ROOT / name)
    for block in all_blocks("python", "toml"):
        if block.file_name is not None and not (folder / block.file_name).exists():
            (folder / block.file_name).write_text(block.text)
    for name in ("vit.py", "gpt.py", "transformer.py"):
        shutil.copy(ROOT / "benchmarks/examples" / name, folder / name)
    shutil.copy(ROOT / "benchmarks/examples/hospitals.py", folder / "mydata.py")
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for part in ("train", "test"):
        arrays[f"{part}_images"] = rng.integers(0, 255, (200, 8, 8), np.uint8)
        arrays[f"{part}_labels"] = np.arange(200) % 4
    np.savez(folder / "photos.npz", **arrays)  # type: ignore[arg-type]
    lines = [f"{n},{n % 7},h{n % 5},{n % 2}" for n in range(100)]
    table = ["age,pressure,hospital,ill", *lines]
    (folder / "patients.csv").write_text("\n".join(table))
    (folder / "speeches").mkdir()
    for number in range(4):
        words = f"speaker {number} says what there is to say. " * 40
        (folder / f"speeches/{number}.txt").write_text(words)
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.mark.slow
def test_commands_run_and_print_what_is_shown(folder: Path) -> None:
    """All that can run here in a moment, in the order of the pages."""
    outcomes: dict[str, tuple[int, str]] = {}
    for command in all_commands():
        words = as_run(command)
        if words is None:
            understand(command)
            continue
        # Some pages show the same.
        name = shlex.join(words)
        if name not in outcomes:
            outcomes[name] = ended(words)
        code, printed = outcomes[name]
        assert code == (2 if is_mistake(command) else 0), f"{command}\n{printed}"
        compare(command, printed)
    assert len(outcomes) >= 20


def is_mistake(command: Command) -> bool:
    """Tell whether a page shows how a command is refused."""
    return any(line.startswith("hpcfed: ") for line in command.shown)


def as_run(command: Command) -> list[str] | None:
    """Return the words for this process, or None where the command cannot run in it."""
    words = command.words
    if command.is_marked or any(word in UNDERSTOOD_ONLY for word in words):
        return None
    if "profile" in words:
        words = words[words.index("profile") - 1 :]
    if words[0] != "hpcfed":
        return None
    words = words[1:]
    if words[0] in ("show", "report", "watch"):
        for path in words[1:]:
            # Runs of the pages are all alike to those who read them.
            if path.startswith("runs/") and not Path(path).exists():
                shutil.copytree("runs/first", path)
    if words[0] == "study":
        return [*words, "--dry-run"]
    if words[0] == "run" and not command.shown:
        words = [*words, *SHORT]
        if not {"--model", "--dataset", "--resume"} & set(words):
            words += ["--model", "mlp"]
        if not {"--batch-size", "--resume"} & set(words):
            words += ["--batch-size", "64"]
    for sign, more in SMALL.items():
        if any(sign in word for word in words):
            words = [*words, *more]
    if "--resume" in words:
        words = [*words, "--rounds", "25"]
    return words


def ended(words: list[str]) -> tuple[int, str]:
    """Run a command in this process; return its exit code, and all that it printed."""
    printed = io.StringIO()
    code: Any = 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            cli.main(words)
        except SystemExit as end:
            code = end.code or 0
    return int(code), printed.getvalue()


def compare(command: Command, printed: str) -> None:
    """Check that the lines which a page shows were printed in that order, but for
    numbers.
    """
    lines = iter(same_but_for_numbers(line) for line in printed.splitlines())
    for line in command.shown:
        # Operators are those of the machine's own library.
        if not line.startswith("aten::"):
            wanted = same_but_for_numbers(line)
            assert wanted in lines, f"{command}\n{line}\nis not in\n{printed}"


def understand(command: Command) -> None:
    """Check a command that does not run here: its files are there, and hpcfed
    understands its options.
    """
    words = command.words
    if is_mistake(command):
        return
    for word in words:
        if word.startswith(("launch/", "slurm/", "benchmarks/")):
            assert Path(word.partition(":")[0]).exists(), command
    if "study" in words:
        at = words.index("study")
        words = [word for word in words[at:] if word != "--submit"]
        words = words[: words.index("--")] if "--" in words else words
        assert ended([*words, "--dry-run"])[0] == 0, command
    asked = options_of_a_run(words)
    needs_files = any(word in UNDERSTOOD_ONLY for word in words)
    if asked is not None and not needs_files:
        with as_rank(words):
            check(parse_run(asked), launched())
    elif asked is not None:
        unknown = set(flags_in(asked)) - known_flags()
        assert not unknown, command


def options_of_a_run(words: list[str]) -> list[str] | None:
    """Return what a command hands to `hpcfed run`, if it is one."""
    if words[0] in OTHER_PROGRAMS:
        return None
    for at, word in enumerate(words):
        if word in ("run", "profile") or word.endswith(
            ("run.sbatch", "profile.sbatch")
        ):
            return [word for word in words[at + 1 :] if word != "--nvtx"]
    return None


@contextlib.contextmanager
def as_rank(words: list[str]) -> Iterator[None]:
    """Let this process look like the first of the ranks that a command starts."""
    size = "1"
    for sign in ("-n", "--ntasks"):
        if sign in words:
            size = words[words.index(sign) + 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMPI_COMM_WORLD_RANK", "0")
        patch.setenv("OMPI_COMM_WORLD_SIZE", size)
        yield


def test_a_mistake_of_many_ranks_is_told_as_shown(folder: Path) -> None:
    told = [c for c in all_commands() if c.words[0] == "mpirun" and is_mistake(c)]
    assert told
    for command in told:
        with as_rank(command.words):
            code, printed = ended(command.words[command.words.index("hpcfed") + 1 :])
        assert code == 2
        compare(command, printed)


def test_commands_for_ranks_run_on_two(
    folder: Path, mpirun: Callable[..., Any]
) -> None:
    """Those for two ranks without a server, in one job."""
    words: list[str] = []
    commands = []
    for command in all_commands():
        start, asked = command.words[:3], options_of_a_run(command.words)
        if start == ["mpirun", "-n", "2"] and "profile" not in command.words:
            assert asked is not None
            commands.append(command)
            words += ["+"] if words else []
            words += [*asked, *SHORT]
    assert "+" in words
    done = mpirun(2, "-m", "tests.several_runs", *words, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert any(command.shown for command in commands)
    for command in commands:
        compare(command, done.stdout + done.stderr)


# Flags and commands within the prose


def known_flags() -> set[str]:
    """Return every flag of hpcfed and of the programs in benchmarks/."""
    flags = set(OTHERS_FLAGS)
    for name in cli.commands.COMMANDS:
        if name == "run":
            _, parser = run_parser(all_method_fields(), "")
            flags.update(flags_in(parser.format_help().split()))
            continue
        flags.update(flags_in(ended([name, "--help"])[1].split()))
    flags.update(flags_in(ended(["attack", "idlg", "--help"])[1].split()))
    for program in (ROOT / "benchmarks").rglob("*.py"):
        text = program.read_text()
        flags.update(re.findall('"(--[a-z][a-z0-9-]*)"', text))
        # Those that are written as the help shows them.
        flags.update(re.findall("(?m)^(--[a-z][a-z0-9-]*)(?: [A-Z,]+)?$", text))
    return flags


def flags_in(words: list[str]) -> list[str]:
    """Return the flags among words, without values and punctuation."""
    found = [re.match("[\\[(]*(--[a-z][a-z0-9-]*)", word) for word in words]
    return [match[1] for match in found if match]


def test_flags_in_the_prose_exist(folder: Path) -> None:
    known = known_flags()
    for page in PAGES:
        for span in spans(page):
            strange = set(flags_in(span.split())) - known
            # A prefix stands for a family: --hn-…
            if ELISION not in span:
                assert not strange, f"{page}: {span}"


def test_choices_in_the_prose_exist() -> None:
    _, parser = run_parser(all_method_fields(), "")
    choices = {}
    for action in parser._actions:
        for flag in action.option_strings:
            choices[flag] = set(str(action.metavar).split("|"))
    looked_at = 0
    for page in PAGES:
        for flag, told in re.findall(
            r"(--[a-z0-9-]+) ([\w-]+(?:\|[\w-]+)+)", _flat(page)
        ):
            if flag in choices and "0" not in told:
                assert set(told.split("|")) <= choices[flag], f"{page}: {flag} {told}"
                looked_at += 1
    assert looked_at > 5


def _flat(page: Path) -> str:
    return "\n".join(spans(page))


def test_commands_in_the_prose_are_understood(folder: Path) -> None:
    known = known_flags()
    seen = 0
    for page in PAGES:
        for command in spoken_commands(page):
            assert set(flags_in(command.words)) <= known, command
            for word in command.words:
                if word.startswith(("benchmarks/", "slurm/", "launch/")):
                    assert (ROOT / word.partition(":")[0]).exists(), command
                if word.startswith("benchmarks."):
                    assert find_spec(word) is not None, command
            seen += 1
    assert seen > 30


# Files that the pages show


@pytest.fixture(scope="module")
def first_run(folder: Path) -> Path:
    """The run that the first page begins with, unless a test before has made it."""
    if not Path("runs/first").exists():
        first = next(c for c in all_commands() if c.words[:2] == ["hpcfed", "run"])
        code, printed = ended(first.words[1:])
        assert code == 0, printed
    return Path("runs/first")


def test_python_is_python(first_run: Path) -> None:
    for block in all_blocks("python"):
        compile(block.text, str(block.page), "exec")
    (reading,) = [b for b in all_blocks("python") if b.page == FILES_PAGE]
    values: dict[str, Any] = {}
    exec(reading.text, values)
    assert values["unit"] == "s"
    assert len(values["accuracy"]) >= 2


def test_names_of_the_python_interface_exist() -> None:
    text = "\n".join(block.text for block in all_blocks("python"))
    names = set(re.findall(r"\bhpcfed\.(\w+)\(", text))
    assert names >= {"run", "open", "study"}
    for name in names:
        assert callable(getattr(hpcfed, name))


def test_toml_is_what_it_is_for(folder: Path) -> None:
    for block in all_blocks("toml"):
        table = tomllib.loads(block.text)
        if "sweep" in table:
            Path("study.toml").write_text(block.text)
            code, printed = ended(["study", "study.toml", "--dry-run"])
            assert code == 0, printed
        elif "project" in table:
            # Those that the program looks for, by `plugins.installed`.
            kinds = {f"hpcfed.{name}" for name in ("methods", "models", "datasets")}
            assert set(table["project"]["entry-points"]) == kinds
        else:
            Path("options.toml").write_text(block.text)
            parse_run(["options.toml"])


# The page on files


def written(folder: Path, **more: Any) -> dict[str, tuple[str, ...]]:
    """Return dimensions, type and unit of every data set of a run that has all of them."""
    settings = {
        "rounds": 2, "clients": 3, "method": "pfedgpa", "dataset": "digits", "seed": 0, "new_clients": 1,
        "new_updates": 1, "depth_sweep": [9], **more,
    }  # fmt: skip
    facts = ("rank", "train_samples", "test_samples", "supplement_samples", "attacker")
    clients = {name: np.ones(3, np.int64) for name in facts}
    clients["classes"] = np.ones((3, 4), np.int64)
    clients["owner"] = np.array(["a", "b", "c"])
    clients |= {name: np.ones(3) for name in ("speed", "downlink", "uplink")}
    folder.mkdir()
    results = ResultsWriter(
        folder,
        settings=settings,
        environment={},
        clients=clients,
        ranks=1,
        facts={},
        relocations=1,
        server=ServerSize(1, 1, {"autoencoder": 2, "denoiser": 2}, overlaps=True),
        finals=["one"],
        figures=["two"],
        metrics=list(METRICS),
        classes=4,
        evaluated=np.arange(3),
        members=2,
    )
    series = [Series(name, "one") for name in TELEMETRY]
    history = History(series, 1.0)
    history.add(0, 1, np.ones(len(series)), 0)
    results.telemetry.write([history], 0.0)
    results.finish("complete", measured=dict.fromkeys(AT_THE_END, np.zeros(1)))
    return described(folder / "run.h5")


def described(path: Path) -> dict[str, tuple[str, ...]]:
    """Return dimensions, type and unit of a file's data sets."""
    found = {}

    def look(name: str, entry: Any) -> None:
        if isinstance(entry, h5py.Dataset):
            dimensions = " × ".join(dimension.label for dimension in entry.dims)
            is_text = h5py.check_string_dtype(entry.dtype) is not None
            kind = "text" if is_text else entry.dtype.str[1:]
            found[name] = (dimensions, kind, entry.attrs.get("units", ""))

    with h5py.File(path) as file:
        file.visititems(look)
    return found


def documented() -> dict[str, tuple[str, ...]]:
    """Return what the page says of every data set of run.h5."""
    found = {}
    section = FILES_PAGE.read_text().partition("| data set |")[2].partition("\n\n")[0]
    for names, *facts in table_rows(section):
        for name in re.findall("`([^`]+)`", names):
            found[name] = tuple(facts[:3])
    return found


def test_the_page_on_files_has_every_data_set_and_no_other(tmp_path: Path) -> None:
    every = written(tmp_path / "one") | written(tmp_path / "two", new_rounds=2)
    assert documented() == every


def test_the_page_on_files_has_each_attribute_once(first_run: Path) -> None:
    told = re.findall(
        "`([^`]+)`",
        "".join(
            row[0] for row in table_rows(_rows_after(FILES_PAGE, "| attribute | |"))
        ),
    )
    assert len(told) == len(set(told))
    with h5py.File(first_run / "run.h5") as file:
        assert set(file.attrs) <= set(told)


def test_the_page_on_files_describes_real_runs(first_run: Path) -> None:
    told = documented()
    for path in first_run.parent.glob("*/run.h5"):
        assert described(path).items() <= told.items(), path


def test_the_page_on_files_tells_what_older_files_lack() -> None:
    for line in FILES_PAGE.read_text().splitlines():
        for name in re.findall("`rounds/([a-z_0-9]+)`", line):
            if name in ROUND_SERIES:
                lacks = line.endswith("| older files lack it |")
                assert lacks != ROUND_SERIES[name].required, name

"""Whatever a user writes: settings, or one line."""

import json
import math
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hpcfed import cli, methods
from hpcfed.config import RunConfig, Settings, check, read_toml, resolve
from hpcfed.errors import UserError, printable
from hpcfed.runtime.launcher import Launch

OPTIONS = {name: methods.load(name).Options for name in ("fedavg", "pfedgpa", "genefl", "genfed", "fedavg-ft")}
PLAIN = st.text(string.ascii_letters + string.digits + " ._-/:'\"\\\n\t<>é", max_size=12)
SCALARS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | PLAIN | st.dates() | st.times()
VALUES = SCALARS | st.lists(SCALARS, max_size=3)


def written(value: Any) -> str:
    """As TOML."""
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
    names = sorted({*RunConfig.model_fields, *OPTIONS[method].model_fields} - {"method"})
    good = st.integers(0, 5) | st.floats(0, 1) | st.sampled_from(["none", "auto", "cpu", "mean", "iid", "0..3", "mlp"])
    keys = st.sampled_from(names) | st.text(string.ascii_lowercase + "_-", min_size=1, max_size=8)
    return st.dictionaries(keys, good | VALUES, max_size=4)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(OPTIONS)).flatmap(lambda method: st.tuples(st.just(method), likely(method))))
@example(("fedavg", {"rounds": 10**18, "clients": 10**18}))
@example(("fedavg", {"dataset": "file:\0"}))
def test_any_values_are_settings_or_one_line(tmp_path: Path, chosen: tuple[str, dict[str, Any]]) -> None:
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
        assert found.config.rounds * found.config.clients < 2**44, "its results would fill any memory"
        assert_read_back(found)


@given(st.text(max_size=60) | st.binary(max_size=60))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example("a = " + "[" * 5000)
@example("a = 1" + "0" * 5000)
def test_any_file_is_options_or_one_line(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "my.toml"
    path.write_bytes(content.encode(errors="surrogatepass") if isinstance(content, str) else content)
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
    again = resolve(values, {name: name for name in values}, type(found.options))
    assert again == found
    assert again.flat() == stored


@pytest.mark.parametrize("method", methods.names())
def test_every_method_reads_its_settings_back(method: str) -> None:
    options = methods.load(method).Options
    assert_read_back(resolve({"method": method, "out": "a/b", "alpha": 0.1, "seeds": "1,2"}, {}, options))

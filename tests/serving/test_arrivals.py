"""Arrival times, and the two public trace formats."""

import gzip
import json
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.serving.arrivals import Arrival, ArrivalsError, load_arrivals, poisson, scaled

DATA = Path(__file__).parents[2] / "../shared/data"
HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = b'{"timestamp": 1, "input_length": 1, "output_length": 1}\n'
COUNTS = st.integers(0, 10**9)


def test_poisson_has_its_rate_and_its_seed() -> None:
    times = list(islice(poisson(4.0, seed=1), 4000))
    assert times == list(islice(poisson(4.0, seed=1), 4000))
    assert all(a < b for a, b in pairwise(times))
    assert 4000 / times[-1] == pytest.approx(4.0, rel=0.05)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(mean**2, rel=0.15)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_or_scale_that_never_arrives_is_refused(rate: float) -> None:
    with pytest.raises(ArrivalsError):
        poisson(rate, 0)
    with pytest.raises(ArrivalsError):
        scaled([], rate)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**9), st.integers(0, 10**6), st.integers(0, 10**6), st.lists(st.integers(0, 99))
        ),
        min_size=1,
        max_size=20,
    )
)
def test_mooncake_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int, list[int]]]
) -> None:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    text = "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)
    path = tmp_path_factory.mktemp("trace") / "t.jsonl.gz"
    path.write_bytes(gzip.compress(text.encode(), 1))
    found = load_arrivals(path)
    ordered = sorted(rows, key=lambda row: row[0])
    assert [(a.input_tokens, a.output_tokens, list(a.prefix_blocks)) for a in found] == [
        (tokens_in, tokens_out, blocks) for _, tokens_in, tokens_out, blocks in ordered
    ]
    assert [a.at_s for a in found] == [(row[0] / 1000 - ordered[0][0] / 1000) for row in ordered]


def test_azure_is_read_sorted_and_scaled(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(
        HEADER + b"2023-11-16 18:17:05.9799600,10,2\n2023-11-16 18:17:03.9799600,4808,10\r\n"
        b"2023-11-16 18:17:13.979960+00:00,5,1\n"
    )
    found = load_arrivals(path)
    assert found == [Arrival(0.0, 4808, 10), Arrival(2.0, 10, 2), Arrival(10.0, 5, 1)]
    assert list(scaled(found, 4)) == [0.0, 0.5, 2.5]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("t.csv", b"a,b,c\n", "line 1: the header is not"),
        ("t.csv", HEADER, "holds no arrival"),
        ("t.csv", HEADER + b"yesterday,1,2\n", "line 2: Invalid isoformat"),
        ("t.csv", HEADER + b"2023-11-16 18:17:03,1\n", "line 2: 2 columns"),
        ("t.csv", HEADER + b"2023-11-16 18:17:03,1,-2\n", '"GeneratedTokens" is -2'),
        ("t.csv", HEADER + b"2023-11-16 18:17:03,\xff,2\n", "line 2: 'utf-8'"),
        ("t.jsonl", b"", "holds no arrival"),
        ("t.jsonl", b"{", "line 1: "),
        ("t.jsonl", b"[]", "a JSON list"),
        ("t.jsonl", b'{"timestamp": "now"}', "\"timestamp\" is 'now'"),
        ("t.jsonl", b'{"timestamp": 1e999}', "line 1: "),
        ("t.jsonl", b'{"timestamp": 1, "input_length": true}', '"input_length" is True'),
        ("t.jsonl", b'{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": 3}', "hash_ids"),
        ("t.jsonl", b" " * (5 << 20), "longer than 4 MiB"),
        ("t.jsonl.gz", b"not gzip", "cannot be read"),
        ("t.jsonl.gz", gzip.compress(ROW * 9, mtime=0)[:-9], "cannot be read"),
        ("t.parquet", b"", "neither *.jsonl (Mooncake) nor *.csv (Azure)"),
    ],
)
def test_a_bad_trace_is_refused_by_name(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ArrivalsError) as caught:
        load_arrivals(path)
    assert reason in str(caught.value) and str(path) in str(caught.value)


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArrivalsError, match="cannot be read"):
        load_arrivals(tmp_path / "absent.csv")


@given(st.sampled_from(["t.csv", "t.jsonl", "t.csv.gz"]), st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("any") / name
    path.write_bytes(gzip.compress(HEADER + content, 1) if name.endswith(".gz") else HEADER + content)
    try:
        assert all(arrival.at_s >= 0 for arrival in load_arrivals(path))
    except ArrivalsError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize(
    ("name", "requests", "hours"),
    [
        ("AzureLLMInferenceTrace_code.csv.gz", 8819, 0.954),
        ("mooncake_conversation_trace.jsonl.gz", 12031, 0.9825),
    ],
)
def test_the_real_traces(name: str, requests: int, hours: float) -> None:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{name} is not on this machine")
    found = load_arrivals(path)
    assert len(found) == requests
    assert found[0].at_s == 0 and found[-1].at_s / 3600 == pytest.approx(hours, abs=0.001)
    assert all(a.at_s <= b.at_s for a, b in pairwise(found))

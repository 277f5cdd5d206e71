import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowmem.units import GIB, KIB, MIB, TIB, counted, format_size, interval_seconds, parse_interval, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        *[("11GiB", 11 * GIB), ("11G", 11 * GIB), ("11g", 11 * GIB), ("11 gib", 11 * GIB), (" 11GIB ", 11 * GIB)],
        *[("800MiB", 800 * MIB), ("800M", 800 * MIB), ("1.5G", 3 * GIB // 2), (".5GiB", GIB // 2), ("2.GiB", 2 * GIB)],
        *[("64KiB", 64 * KIB), ("2T", 2 * TIB), ("512", 512), ("512B", 512), ("512 bytes", 512)],
        *[("11GB", 11 * 10**9), ("16 MB", 16 * 10**6), ("2tb", 2 * 10**12), ("64kB", 64_000)],
    ],
)
def test_sizes_are_powers_of_two_and_those_in_gb_of_ten_in_any_case_and_spacing(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    ["", " ", "GiB", "eleven", "11GiBs", "11GBs", "-1GiB", "+1GiB", "0", "0GiB", "0.1B", "nan", "inf", "1e9"]
    + ["1,5GiB", "1_000", "1 1GiB", "11GiB 5MiB", "0x10", "8388608TiB", "9" * 400, "9" * 308 + "TiB"],
)
def test_what_is_no_size_is_refused_with_what_was_typed(text):
    with pytest.raises(ValueError, match="is not a size") as error:
        parse_size(text)
    assert repr(text) in str(error.value)


@given(st.text() | st.from_regex(r"\d{1,400}\.?\d{0,3} ?[kKmMgGtT]?(iB)?", fullmatch=True))
def test_any_text_is_a_positive_size_or_a_value_error(text):
    try:
        assert parse_size(text) > 0
    except ValueError:
        pass


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        *[(0, "0 bytes"), (1, "1 byte"), (1023, "1023 bytes"), (KIB, "1.00 KiB"), (800 * MIB, "800 MiB")],
        (GIB, "1.00 GiB"),
        *[(11 * GIB, "11.0 GiB"), (int(10.94 * GIB), "10.9 GiB"), (5 * TIB, "5.00 TiB"), (-3 * GIB, "-3.00 GiB")],
    ],
)
def test_sizes_for_people_have_three_digits(size_bytes, text):
    assert format_size(size_bytes) == text


@given(st.integers(1, 900 * TIB))
def test_a_printed_size_reads_back_within_half_a_percent(size_bytes):
    assert abs(parse_size(format_size(size_bytes)) - size_bytes) <= 0.005 * size_bytes + 1  # 1: whole bytes
    assert size_bytes <= parse_size(format_size(size_bytes, rounded_up=True)) + 1 <= 1.01 * size_bytes + 2


@pytest.mark.parametrize(
    ("text", "interval", "seconds"),
    [
        ("500", 500, None), (" 7 ", 7, None), ("30min", "30min", 1800.0), ("2 h", "2h", 7200.0),
        ("1.5H", "1.5h", 5400.0), ("90s", "90s", 90.0), ("10m", "10m", 600.0), ("3hours", "3hours", 10800.0),
        ("1 d", "1d", 86400.0), ("30 Minutes", "30minutes", 1800.0),
    ],
)  # fmt: skip
def test_an_interval_is_steps_or_a_time(text, interval, seconds):
    assert parse_interval(text) == interval
    assert interval_seconds(interval) == seconds
    assert parse_interval(str(interval)) == interval


@pytest.mark.parametrize("text", ["", "0", "0min", "1.5", "-3", "min", "3 weeks", "1e3", "30min2h", "\u0663"])
def test_what_is_no_interval_is_refused(text):
    with pytest.raises(ValueError, match="neither a number of steps nor a time"):
        parse_interval(text)


@pytest.mark.parametrize(
    ("number", "things", "said"), [(1, "rows", "1 row"), (0, "rows", "0 rows"), (2000, "files", "2,000 files")]
)
def test_a_number_of_things_is_said_as_people_say_it(number, things, said):
    assert counted(number, things) == said

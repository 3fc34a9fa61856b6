from __future__ import annotations

import json

from ckptio.cli.text import count, fold, format_nbytes, format_time, table, visible
from ckptio.cli.values import short_json
from ckptio.storage.file_names import numbered


def test_values_are_shown_as_short_json() -> None:
    """Exact values are for `--json`."""
    tagged = {
        '{"~": "float", "v": "fff0000000000000"}': '"-inf"',
        '{"~": "int", "v": "-100000000000000000"}': '"-0x100000000000000000"',
        '{"~": "int", "v": "20000000000001"}': '"0x20000000000001"',
        '{"~": "complex", "v": "3ff00000000000004000000000000000"}': '"(1+2j)"',
        '{"~": "npscalar", "d": "<f4", "v": "AADAPw=="}': "1.5",
        '{"~": "npscalar", "d": "<i8", "v": "BwAAAAAAAAA="}': "7",
        '{"~": "set", "v": [1, 2]}': "[1, 2]",
        '{"~": "torch.dtype", "v": "float32"}': '"torch.float32"',
        '{"~": "dict", "v": [[{"~": "tuple", "v": [1]}, {"~": "odict", "v": {"a": 1}}]]}': (
            '{"[1]": {"a": 1}}'
        ),
        '{"~": "path", "k": "Path", "v": "/x"}': '"/x"',
        '{"~": "new", "v": 1}': '{"~": "new", "v": 1}',
        '{"~": "complex", "v": "x"}': '{"~": "complex", "v": "x"}',
        '{"~": "datetime", "f": 0, "v": 7}': '{"~": "datetime", "f": 0, "v": 7}',
        '{"~": "npscalar", "d": "<f4", "v": "AADAfw=="}': '"nan"',
        '{"a": {"~": "set", "v": [1]}}': '{"a": [1]}',
        '{"~": "dict", "v": [["é", 1], [{"~": "tuple", "v": ["é"]}, 2]]}': (
            r'{"é": 1, "[\"é\"]": 2}'
        ),
        "null": "null",
    }
    for document, shown in tagged.items():
        assert short_json(json.loads(document), 60) == shown
    assert short_json("x" * 100, 40) == '"xxxxxxxxxxxxxxxxxxx... (100 characters)'
    held = {"~": "enum", "c": "m:E", "v": {"~": "tuple", "v": list(range(100))}}
    assert short_json(held, 30) == "[0, 1, 2, 3, 4... (100 items)"
    number = {"~": "enum", "c": "m:E", "v": {"~": "int", "v": "f" * 100}}
    assert short_json(number, 30) == '"0xfffffff... (102 characters)'
    time = {"~": "timedelta", "v": [1, 2, 3]}
    assert short_json(time, 20) == '"... (21 characters)'
    assert short_json(list(range(10**6)), 30) == "[0, 1, 2, 3... (1000000 items)"


def test_numbers_and_times_are_for_people() -> None:
    """Sizes in powers of 1024, times to the second."""
    sizes = [0, 1023, 1024, 1024**2 - 1, 1024**3, 5 * 1024**6]
    assert [format_nbytes(n) for n in sizes] == [
        *("0 B", "1023 B", "1.0 KiB", "1.0 MiB", "1.0 GiB", "5120 PiB"),
    ]
    assert format_time("2026-02-03T04:05:06.789+01:00") == "2026-02-03 03:05:06Z"
    assert format_time("\x1bnever") == r"\x1bnever"
    assert (count(1, "file"), count(0, "file")) == ("1 file", "0 files")
    assert sorted(["step-10", "step-9", "a"], key=numbered) == ["a", "step-9", "step-10"]
    assert numbered("9" * 5000) < numbered("1" + "0" * 5000)


def test_columns_count_what_a_terminal_shows() -> None:
    """Some characters take two columns, some none."""
    assert table([("層", "1"), ("ab", "22")], [1], None) == ["層   1", "ab  22"]
    assert table([("層", "1")], [1], 4) == []
    assert fold(["ab", "cd", "efghij"], 6, " ") == [" ab", " cd", " efghij"]
    assert visible("naïve 層 \udcff\u2028\x7f") == r"naïve 層 \udcff\u2028\x7f"

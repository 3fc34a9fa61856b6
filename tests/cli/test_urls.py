"""Commands on checkpoints in a store; fsspec's own in memory stands for all of them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import fsspec
import fsspec.asyn
import pytest
import torch

from ckptio import sync
from ckptio.__main__ import main
from ckptio.cli import verdict
from ckptio.cli.find_objects import find_objects
from ckptio.config import CheckpointConfig
from ckptio.errors import CheckpointNotFoundError
from ckptio.format.note import CopyNote, encode_note
from ckptio.storage.file_names import NOTE_PREFIX
from tests.cli.rig import make_state, run_json
from tests.rig import SMALL, assert_same
from tests.storage.object_rig import put
from tests.storage.web import serving

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_leaks")
NAMES = [f"step-{step:08d}" for step in range(1, 5)]
OLD_S = 10_000


@pytest.fixture(autouse=True, scope="module")
def fsspec_loop() -> None:
    """Begin the thread of fsspec, which stays."""
    fsspec.asyn.get_loop()


@pytest.fixture
def run_url(url: str) -> str:
    """A run of four steps; its loss is lowest at the second."""
    with sync.Checkpointer(url, config=SMALL) as ckpt:
        for step in range(1, 5):
            ckpt.save({"w": torch.full((100,), float(step))}, step, metrics={"loss": abs(step - 2)})
    return url


def keys(url: str) -> list[str]:
    """What is below a URL, relative to it."""
    top = "/" + url.partition("://")[2]
    return [key.removeprefix(f"{top}/") for key in fsspec.filesystem("memory").find(top)]


def test_ls_lists_what_is_below_a_url(run_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As below a directory: what has no commit with --all, what is another program's never."""
    put(f"{run_url}/other/manifest.json", b'{"version": 1}')
    put(f"{run_url}/damaged/manifest.json", b'{"ckptio":2}')
    put(f"{run_url}/step-00000009/data-{'a' * 32}-00000-00000.safetensors", b"xyz")
    code, document = run_json(capsys, "ls", run_url, "--sort", "name")
    assert code == 1
    assert [(row["path"], row["state"]) for row in document["checkpoints"]] == [
        ("damaged", "damaged"),
        *((name, "committed") for name in NAMES),
    ]
    assert document["checkpoints"][1]["nbytes"] > 0
    _, document = run_json(capsys, "ls", run_url, "--sort", "name", "--all")
    (dead,) = [row for row in document["checkpoints"] if row["state"] == "no_commit"]
    assert (dead["path"], dead["nbytes"], dead["num_files"]) == ("step-00000009", 3, 1)
    code, document = run_json(capsys, "ls", f"{run_url}/{NAMES[0]}")
    assert (code, [row["path"] for row in document["checkpoints"]]) == (0, ["."])
    sync.save({}, f"{run_url}/.old/step-0", config=SMALL)
    for options in ([], ["--all"]):
        _, document = run_json(capsys, "ls", run_url, *options)
        paths = [row["path"] for row in document["checkpoints"]]
        assert (".old/step-0" in paths) == bool(options)
    code, document = run_json(capsys, "ls", f"{run_url}/nothing")
    assert (code, document["checkpoints"], document["error"]) == (0, [], None)
    _, document = run_json(capsys, "ls", run_url.removesuffix("/run"), "--depth", "1")
    assert document["checkpoints"] == []
    assert main(["ls", run_url.removesuffix("/run")]) == 1
    assert f"run/{NAMES[3]}" in capsys.readouterr().out


def test_a_damaged_checkpoint_that_goes_while_it_is_looked_at_is_no_bug(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was damaged when it was read: whose it was, nobody can say any more."""
    memory = fsspec.filesystem("memory")

    async def find(*args: Any, **options: Any) -> Any:
        found = await find_objects(*args, **options)
        memory.rm_file(f"/{url.partition('://')[2]}/manifest.json")
        return found

    monkeypatch.setattr(verdict, "find_objects", find)
    for command in ("show", "verify"):
        put(f"{url}/manifest.json", b'{"ckptio":2}')
        code, document = run_json(capsys, command, url)
        assert (code, '"damaged"' in json.dumps(document)) == (1, True)


def test_show_verify_and_diff_read_a_url(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They say the same as of a directory."""
    for path in (url, str(tmp_path / "c")):
        sync.save(make_state(), path, config=SMALL)
    shown = [run_json(capsys, "show", path)[1] for path in (url, str(tmp_path / "c"))]
    names = [[entry["name"] for entry in document["entries"]] for document in shown]
    assert names[0] == names[1]
    assert shown[0]["state"] == "committed"
    code, document = run_json(capsys, "verify", url, str(tmp_path / "c"))
    assert code == 0
    assert [found["state"] for found in document["checkpoints"]] == ["whole", "whole"]
    code, document = run_json(capsys, "diff", url, str(tmp_path / "c"))
    assert (code, document["equal"]) == (0, True)
    for argv in (("show", f"{url}-x"), ("verify", f"{url}-x"), ("diff", url, f"{url}-x")):
        assert run_json(capsys, *argv)[0] == 2


def test_a_url_without_a_checkpoint_says_what_is_below(
    run_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The highest step that was committed, as in a directory."""
    put(f"{run_url}/step-00000009/data-{'c' * 32}-00000-00000.safetensors")
    put(f"{run_url}/step-100/data-{'c' * 32}-00000-00000.safetensors")
    put(f"{run_url}/tensorboard/events")
    put(f"{run_url}/zeros.txt")
    below = f"there is no committed checkpoint here, but below, as {NAMES[3]!r}"
    for command in ("show", "verify"):
        assert main([command, run_url]) == 2
        assert f"{run_url}: {below}" in capsys.readouterr().err
    with pytest.raises(CheckpointNotFoundError, match=below):
        sync.load(run_url, config=SMALL)


def test_verify_finds_a_changed_byte(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In the store, too."""
    sync.save({"w": torch.zeros(1000)}, url, config=SMALL)
    (name,) = [key for key in keys(url) if key.startswith("data-")]
    memory = fsspec.filesystem("memory")
    path = f"/{url.partition('://')[2]}/{name}"
    data = memory.cat_file(path)
    memory.pipe_file(path, data[:-1] + bytes([data[-1] ^ 1]))
    code, document = run_json(capsys, "verify", url)
    assert code == 1
    assert document["checkpoints"][0]["damage"][0]["file"] == name


def test_convert_reads_from_a_url(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint of ours, by ranges."""
    state = {"w": torch.arange(1000)}
    sync.save(state, url, config=SMALL)
    target = tmp_path / "w.safetensors"
    code, document = run_json(capsys, "convert", url, str(target), "--to", "safetensors")
    assert (code, document["state"]) == (0, "converted")
    assert_same(sync.load(target), state)


def test_prune_removes_steps_at_a_url(run_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a directory, with a plan first."""
    argv = ("prune", run_url, "--keep-last", "1", "--keep-best", "loss:min")
    code, planned = run_json(capsys, *argv, "--dry-run")
    assert code == 0
    assert len(keys(run_url)) == 8
    code, document = run_json(capsys, *argv)
    assert (code, document) == (0, {**planned, "dry_run": False})
    assert {key.partition("/")[0] for key in keys(run_url)} == {NAMES[1], NAMES[3]}
    assert [removed["step"] for removed in document["removed"]] == [1, 3]
    assert all(removed["nbytes"] > 0 for removed in document["removed"])
    code, document = run_json(capsys, "prune", f"{run_url}-x", "--keep-last", "1")
    assert (code, document["removed"]) == (0, [])


def test_owed_copies_are_said_and_stay_at_a_url(
    run_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a directory."""
    code, document = run_json(capsys, "show", f"{run_url}/{NAMES[0]}")
    note = f"{run_url}/{NAMES[0]}/{NOTE_PREFIX}{document['save_id']}"
    put(note, encode_note(CopyNote(copy_to="s3://bucket/there", overwrite=False)))
    code, document = run_json(capsys, "ls", "--sort=name", run_url)
    assert [row["owed_to"] for row in document["checkpoints"]] == ["s3://bucket/there", *[None] * 3]
    code, document = run_json(capsys, "show", f"{run_url}/{NAMES[0]}")
    assert (document["owed"], document["owed_to"]) == (True, "s3://bucket/there")
    argv = ("prune", run_url, "--keep-last", "1")
    code, document = run_json(capsys, *argv)
    assert (code, [removed["step"] for removed in document["removed"]]) == (0, [2, 3])
    assert [owed["step"] for owed in document["owed"]] == [1]
    code, document = run_json(capsys, *argv, "--even-owed")
    assert {key.partition("/")[0] for key in keys(run_url)} == {NAMES[3]}


def test_doctor_tries_a_store_and_leaves_nothing(
    run_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And finds what dead saves left, nothing of living ones and of checkpoints."""
    dead = f"step-00000009/data-{'a' * 32}-00000-00000.safetensors"
    put(f"{run_url}/{dead}", b"xyz", OLD_S)
    put(f"{run_url}/{NAMES[0]}/.manifest-{'b' * 32}-old", b"xyz", OLD_S)
    put(f"{run_url}/step-00000010/data-{'c' * 32}-00000-00000.safetensors")
    before = keys(run_url)
    code, document = run_json(capsys, "doctor", run_url)
    assert code == 0
    assert keys(run_url) == before
    assert (document["file_system"], document["free_nbytes"]) == ("memory", None)
    states = {finding["name"]: finding["state"] for finding in document["findings"]}
    assert states.pop("uploads") == "slow"
    assert set(states.values()) == {"yes"}
    assert {"race", "clock", "latency", "removing", "exclusive objects"} <= set(states)
    assert [leftover["path"] for leftover in document["leftovers"]] == [
        f"{run_url}/{NAMES[0]}",
        f"{run_url}/step-00000009",
    ]
    assert main(["doctor", run_url]) == 0
    assert "2 files of dead saves" not in capsys.readouterr().out
    assert main(["doctor", f"{run_url}/step-00000010"]) == 0  # what it has is young
    assert "nothing left by dead saves that are over an hour old" in capsys.readouterr().out


def test_options_of_a_store_are_passed_on_and_never_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where they mean nothing they are refused, in words."""
    secret = "do-not-show"  # noqa: S105  # that is what is looked for
    for argv in (
        ("ls", str(tmp_path)),
        ("show", str(tmp_path)),
        ("verify", str(tmp_path)),
        ("prune", str(tmp_path), "--keep-last", "1"),
        ("doctor", str(tmp_path)),
        ("diff", str(tmp_path), str(tmp_path)),
        ("convert", str(tmp_path), str(tmp_path / "x"), "--to", "dcp"),
    ):
        code, document = run_json(capsys, *argv, "--storage-option", f"secret={secret}")
        assert code == 2
        assert "no effect" in document.get("error", "")
    for option in (secret, f"=={secret}", f'x={{"{secret}"'):
        assert main(["ls", "memory://x", "--storage-option", option]) == 2
        assert secret not in capsys.readouterr().err
    assert main(["ls", "nope://x", "--storage-option", f"secret={secret}"]) == 2
    assert main(["ls", f"s3://key:{secret}@bucket/x"]) == 2
    assert main(["show", f"s3://key:{secret}@bucket/x", "--json"]) == 2
    sent = capsys.readouterr()
    assert secret not in sent.err + sent.out
    assert "s3://***@bucket/x" in sent.err


def test_an_option_is_text_unless_it_is_a_json_word() -> None:
    """Digits stay text: ids of keys may be nothing else."""
    from ckptio.cli.config import config_for  # noqa: PLC0415  # what this test is about

    options = ["key=0123", "anon=false", 'client_kwargs={"region_name": "x"}', "a=b=c", "t="]
    config = config_for(["s3://bucket/x"], options)
    assert config.storage_options == {
        "key": "0123",
        "anon": False,
        "client_kwargs": {"region_name": "x"},
        "a": "b=c",
        "t": "",
    }
    assert config_for(["x"], []) == CheckpointConfig.from_env()


@pytest.mark.parametrize(
    "argv",
    [
        ["ls", "s3://bucket/run"],
        ["show", "s3://bucket/run/a"],
        ["verify", "s3://bucket/run/a"],
        ["diff", "s3://bucket/a", "s3://bucket/b"],
        ["prune", "s3://bucket/run", "--keep-last", "1"],
        ["doctor", "s3://bucket/run"],
        ["convert", "s3://bucket/a", "out", "--to", "dcp"],
    ],
)
def test_a_package_that_is_missing_is_said_in_words(argv: list[str]) -> None:
    """With the way to get it, and no traceback."""
    script = (
        "import sys\nsys.modules['s3fs'] = None\n"
        f"from ckptio.__main__ import main\nsys.exit(main({[*argv, '--json']!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "pip install ckptio[s3]" in json.dumps(json.loads(done.stdout))


@pytest.mark.parametrize(
    "command",
    ["show", "verify", "ls", "diff URL", "convert TARGET --to=hf", "doctor", "prune --keep-last=1"],
)
def test_a_signature_is_not_said(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither in the text nor in the document; whatever comes of it."""
    pytest.importorskip("aiohttp")
    sync.save({"a": torch.ones(3)}, tmp_path / "c", config=SMALL)
    with serving() as web:
        for file in (tmp_path / "c").iterdir():
            web.put(f"/c/{file.name}", file.read_bytes())
        for path, how in itertools.product(("none", "c"), ([], ["--json"])):
            url = f"{web.url}/{path}?signature=s3cr3t"  # no id of a save has its letters
            name, *more = command.split()
            given = {"URL": url, "TARGET": str(tmp_path / "x")}
            main([name, url, *(given.get(option, option) for option in more), *how])
            said = "".join(capsys.readouterr())
            assert "s3cr3t" not in said
            assert "?..." in said or path == "c"

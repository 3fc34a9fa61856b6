"""Sources and targets that are one, or parts of each other, under other paths."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch

from ckptio import sync
from ckptio.errors import ConfigError
from tests.foreign.rig import assert_same_state
from tests.rig import SMALL

if TYPE_CHECKING:
    from pathlib import Path

    from ckptio.conversion.convert import Format


class Related(NamedTuple):
    """A conversion that would destroy its source: what is read, and what is written as what."""

    read: Path
    target: Path
    to: Format


def related(kind: str, root: Path) -> Related:
    """Relate them, beside a folder `f` of two files, and a checkpoint of ours `ours`."""
    folder, links, own = root / "f", root / "links", root / "ours"
    first = min(path.name for path in folder.iterdir())
    (folder / "sub").mkdir()
    (root / "sub").symlink_to(folder / "sub")
    links.mkdir()
    for path in folder.glob("model*"):
        (links / path.name).symlink_to(path)
    index = folder / "model.safetensors.index.json"
    data = min(own.glob("data-*"))
    return {
        "an index to its folder": Related(index, folder, "hf"),
        "an index to a file": Related(index, folder / first, "safetensors"),
        "a folder to its index": Related(folder, index, "safetensors"),
        "links to where they lead": Related(links, folder, "hf"),
        "links to a file": Related(links, folder / first, "safetensors"),
        "up from a link": Related(folder, root / "sub" / ".." / first, "safetensors"),
        "a data file": Related(data, own, "ckptio"),
    }[kind]


RELATIONS = (
    "an index to its folder",
    "an index to a file",
    "a folder to its index",
    "links to where they lead",
    "links to a file",
    "up from a link",
    "a data file",
)


@pytest.mark.parametrize("kind", RELATIONS)
def test_a_conversion_does_not_replace_what_its_source_leads_to(tmp_path: Path, kind: str) -> None:
    """By whatever path it is written."""
    state = {"a": torch.ones(4), "b": torch.zeros(4)}
    sync.save(state, tmp_path / "ours", config=SMALL)
    sync.convert(tmp_path / "ours", tmp_path / "f", to="hf", max_shard_nbytes=16)
    read, target, to = related(kind, tmp_path)
    with pytest.raises(ConfigError, match="give another path"):
        sync.convert(read, target, to=to, select="b", overwrite=True)
    for path in (tmp_path / "ours", tmp_path / "f", tmp_path / "links"):
        assert_same_state(sync.load(path), state)


def test_a_link_on_the_way_to_a_file_is_spared(tmp_path: Path) -> None:
    """As those in the caches of model hubs: what it leads to stays, but nobody finds it."""
    state = {"a": torch.ones(4), "b": torch.zeros(4)}
    sync.save(state, tmp_path / "ours", config=SMALL)
    sync.convert(tmp_path / "ours", tmp_path / "hub", to="hf")
    links, hub, name = tmp_path / "links", tmp_path / "hub", "model.safetensors"
    (hub / name).rename(tmp_path / "blob")
    (hub / name).symlink_to("../blob")
    links.mkdir()
    (links / name).symlink_to(f"../hub/{name}")
    for source in (links, links / name, hub / name):
        with pytest.raises(ConfigError, match="give another path"):
            sync.convert(source, hub, to="hf", select="b", overwrite=True)
        assert_same_state(sync.load(source), state)


@pytest.mark.parametrize("linked", ["metadata", "data"])
def test_a_part_of_a_source_of_dcp_is_spared(tmp_path: Path, linked: str) -> None:
    """Metadata that is replaced, and data that nobody has committed there: without `overwrite`."""
    state = {"a": torch.ones(4), "b": torch.zeros(4)}
    sync.save(state, tmp_path / "ours", config=SMALL)
    sync.convert(tmp_path / "ours", tmp_path / "there", to="dcp")
    links, there = tmp_path / "links", tmp_path / "there"
    links.mkdir()
    for path in there.iterdir():
        if (path.name == ".metadata") == (linked == "metadata"):
            (links / path.name).symlink_to(path)
        else:
            path.rename(links / path.name)
    with pytest.raises(ConfigError, match="give another path"):
        sync.convert(links, there, to="dcp", select="b", overwrite=linked == "metadata")
    assert_same_state(sync.load(links), state)


def test_what_others_left_there_is_read_if_it_stays(tmp_path: Path) -> None:
    """Files of the stock writer go with what is replaced alone."""
    state = {"a": torch.ones(4), "b": torch.zeros(4)}
    torch.save(state, tmp_path / "__0_0.distcp")
    with pytest.raises(ConfigError, match="give another path"):
        sync.convert(tmp_path / "__0_0.distcp", tmp_path, to="dcp", overwrite=True)
    sync.convert(tmp_path / "__0_0.distcp", tmp_path, to="dcp", select="b")
    assert_same_state(sync.load(tmp_path / "__0_0.distcp"), state)
    assert set(sync.load(tmp_path)) == {"b"}


@pytest.mark.parametrize("to", ["safetensors", "hf"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_was_written_aside_is_spared(tmp_path: Path, to: Format, *, overwrite: bool) -> None:
    """A conversion that was killed last of all has left all of it."""
    state = {"a": torch.ones(4), "b": torch.zeros(4)}
    sync.save(state, tmp_path / "ours", config=SMALL)
    aside = tmp_path / ".model.safetensors.partial"
    sync.convert(tmp_path / "ours", aside, to="safetensors")
    target = tmp_path if to == "hf" else tmp_path / "model.safetensors"
    with pytest.raises(ConfigError, match="give another path"):
        sync.convert(aside, target, to=to, select="b", overwrite=overwrite)
    assert_same_state(sync.load(aside), state)


def test_a_data_file_without_its_manifest_is_spared(tmp_path: Path) -> None:
    """A save to where it is takes it for what is left over of another one."""
    sync.save({"a": torch.ones(4), "b": torch.zeros(4)}, tmp_path / "c", config=SMALL)
    (tmp_path / "c" / "manifest.json").unlink()
    (data,) = (tmp_path / "c").iterdir()
    with pytest.raises(ConfigError, match="give another path"):
        sync.convert(data, tmp_path / "c", to="ckptio", select="a")
    assert set(sync.load(data)) == {"a", "b"}


def test_a_file_beside_what_is_read_is_replaced(tmp_path: Path) -> None:
    """It is no part of the source, nor is a hard link to one."""
    state = {"a": torch.ones(4), "b": torch.zeros(4)}
    sync.save(state, tmp_path / "c", config=SMALL)
    beside, copy = tmp_path / "c" / "model.safetensors", tmp_path / "copy"
    for names in ("a", None):
        sync.convert(tmp_path / "c", beside, to="safetensors", select=names, overwrite=True)
    copy.hardlink_to(beside)
    sync.convert(beside, copy, to="safetensors", select="a", overwrite=True)
    assert_same_state(sync.load(beside), state)
    sync.convert(beside, tmp_path / "c", to="ckptio", select="b", overwrite=True)
    assert_same_state(sync.load(beside), state)


@pytest.mark.skipif(os.geteuid() != 0, reason="may not mount")
@pytest.mark.parametrize("to", ["hf", "dcp", "ckptio"])
def test_a_folder_that_is_mounted_twice_is_not_converted_to_itself(
    tmp_path: Path, to: Format
) -> None:
    state = {"a": torch.ones(4), "b": torch.zeros(4)}
    source, mount = tmp_path / "c", tmp_path / "mount"
    sync.save(state, tmp_path / "ours", config=SMALL)
    sync.convert(tmp_path / "ours", source, to=to, config=SMALL)
    mount.mkdir()
    if subprocess.run(["mount", "--bind", source, mount], check=False).returncode:  # noqa: S607  # as the system has it
        pytest.skip("may not mount")
    try:
        with pytest.raises(ConfigError, match="is converted to itself"):
            sync.convert(source, mount, to=to, select="a", overwrite=True)
    finally:
        subprocess.run(["umount", mount], check=True)  # noqa: S607  # as the system has it
    assert_same_state(sync.load(source), state)

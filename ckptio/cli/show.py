"""`ckptio show`: what a checkpoint is made of, without reading its data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from ckptio.checkpointer.steps import metrics_of
from ckptio.cli.config import config_for
from ckptio.cli.entries import read_entries
from ckptio.cli.outcome import FAILED, exit_code, explain, state_of
from ckptio.cli.owed import read_owed
from ckptio.cli.terminal import Terminal
from ckptio.cli.text import count, fold, format_metrics, format_nbytes, format_time, pad, visible
from ckptio.cli.values import short_json
from ckptio.cli.verdict import judge
from ckptio.errors import CheckpointError
from ckptio.runtime.solo import solo_engine
from ckptio.state.select import make_predicate
from ckptio.storage.keys import shown_url

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptio.cli.entries import Entry
    from ckptio.cli.owed import Owed
    from ckptio.config import CheckpointConfig
    from ckptio.engine.context import EngineContext
    from ckptio.format.manifest import Manifest

    Json = dict[str, Any]

_MAX_VALUE = 60  # characters of a value
_MIN_VALUE = 16
_INDENT = "  "
_NAMELESS = '""'  # a key that is empty


def run(path: str, *, select: Sequence[str], storage_options: Sequence[str], as_json: bool) -> int:
    """Show a checkpoint, and give the exit code."""
    terminal, name = Terminal(), shown_url(path)
    config: CheckpointConfig | None = None
    try:
        keep = make_predicate(select) if select else None
        config = config_for([path], storage_options)
        manifest, owed = _read(path, config)
        entries = list(read_entries(manifest, keep))
    except CheckpointError as error:
        state, problem = state_of(error), explain(error)
        if config is not None:
            state, problem = judge(path, error, config)
        if as_json:
            terminal.json({**_blank(name), "state": state, "error": problem})
        terminal.message(f"{name}: {problem}")
        return exit_code([state])
    no_name = None if entries else f"no name matches {' '.join(select)}"
    if as_json:
        terminal.json({**_document(name, manifest, entries, owed), "error": no_name})
    elif no_name is None:
        terminal.lines(layout(name, manifest, entries, terminal.width, owed))
    if no_name is not None:
        terminal.message(f"{name}: {no_name}")
        return FAILED
    return exit_code(["committed"])


def _read(path: str, config: CheckpointConfig) -> tuple[Manifest, Owed | None]:
    """Read a manifest, and whether a copy is owed.

    Raises:
        CheckpointError: The manifest cannot be read.
    """

    async def read(context: EngineContext) -> tuple[Manifest, Owed | None]:
        storage = core.storage(path)
        manifest = await context.cache.get(storage)
        is_ours = not manifest.is_foreign
        return manifest, await read_owed(storage, manifest.save_id) if is_ours else None

    with solo_engine(config) as core:
        return core.call_blocking(read, "inspect")


def _blank(path: str) -> Json:
    """Give the JSON document of a checkpoint that cannot be read."""
    return {
        "path": path,
        "state": "committed",
        "committed": None,
        "format": None,
        "writer": None,
        "save_id": None,
        "metrics": None,
        "owed": None,
        "owed_to": None,
        "num_tensors": None,
        "nbytes": None,
        "files": [],
        "entries": [],
        "error": None,
    }


def _document(path: str, manifest: Manifest, entries: Sequence[Entry], owed: Owed | None) -> Json:
    """Give the JSON document of a checkpoint."""
    stored = _stored(entries)
    return {
        **_blank(path),
        "committed": manifest.created,
        "format": None if manifest.is_foreign else manifest.ckptio,
        "writer": manifest.writer,
        "save_id": None if manifest.is_foreign else manifest.save_id,
        "metrics": metrics_of(manifest.metadata),
        "owed": owed is not None,
        "owed_to": None if owed is None else owed.to,
        "num_tensors": len(stored),
        "nbytes": sum(manifest.tensors[i].nbytes for i in stored),
        "files": [{"name": file.name, "nbytes": file.nbytes} for file in manifest.files],
        "entries": [_object(entry, manifest) for entry in entries if entry.kind != "container"],
    }


def _object(entry: Entry, manifest: Manifest) -> Json:
    """Give the JSON object of a name."""
    return {
        "name": entry.name,
        "kind": entry.kind,
        "dtype": entry.dtype,
        "shape": entry.shape,
        "nbytes": entry.nbytes,
        "stored_as": None if entry.index is None else manifest.tensors[entry.index].name,
        "tied_to": entry.tied_to,
        "is_view": entry.is_view,
        "chunks": [] if entry.index is None else _chunks(manifest, entry.index),
        "value": entry.node if entry.kind == "value" else None,
    }


def _chunks(manifest: Manifest, index: int) -> list[Json]:
    """Say where the bytes of a stored tensor are."""
    tensor = manifest.tensors[index]
    chunks = []
    for chunk in tensor.chunks:
        box = tensor.box_of(chunk)
        chunks.append(
            {
                "file": manifest.files[chunk.file].name,
                "start": chunk.start,
                "stop": chunk.start + tensor.chunk_nbytes(chunk),
                "global_offset": box.offset,
                "local_shape": box.shape,
                "copies": [
                    {"file": manifest.files[file].name, "start": start}
                    for file, start in chunk.copies
                ],
            }
        )
    return chunks


def _stored(entries: Sequence[Entry]) -> list[int]:
    """Number the stored tensors behind entries, each once."""
    return sorted({entry.index for entry in entries if entry.index is not None})


def layout(
    path: str,
    manifest: Manifest,
    entries: Sequence[Entry],
    width: int | None,
    owed: Owed | None = None,
) -> Iterator[str]:
    """Lay a checkpoint out: what it is, its tree, the files that have it, and totals."""
    yield visible(path)
    about = [format_time(manifest.created)]
    if manifest.is_foreign:
        about.append(visible(manifest.writer))
    else:
        about.append(f"format {manifest.ckptio}")
        about += [f"ckptio {visible(manifest.writer)}", f"save {manifest.save_id}"]
    yield from fold(about, width)
    if metrics := metrics_of(manifest.metadata):
        yield from fold([visible(format_metrics(metrics))], width)
    if owed is not None:
        yield from fold([visible(str(owed))], width)
    yield ""
    yield from _tree(manifest, entries, width)
    stored = _stored(entries)
    used = sorted({file for i in stored for files in _files(manifest, i) for file in files})
    if used:
        yield ""
    for i in used:
        file = manifest.files[i]
        yield from fold(
            [f"#{i}", visible(file.name), format_nbytes(file.nbytes)], width, hang=_INDENT
        )
    yield ""
    nbytes = sum(manifest.tensors[i].nbytes for i in stored)
    totals = [count(len(stored), "tensor"), format_nbytes(nbytes)]
    if len(stored) < len(manifest.tensors):
        totals[0] = f"{len(stored)} of {count(len(manifest.tensors), 'tensor')}"
    totals += [f"in {count(len(used), 'file')}"]
    yield from fold(totals, width)


def _tree(manifest: Manifest, entries: Sequence[Entry], width: int | None) -> Iterator[str]:
    """Lay the tree out in columns; where they are too wide, details go below the names."""
    labels = [_INDENT * entry.depth + (visible(entry.label) or _NAMELESS) for entry in entries]
    details = [_details(entry, manifest) for entry in entries]
    first = max(cell_len(label) for label in labels)
    tensors = [parts for parts in details if parts]
    second = max((cell_len(parts[0]) for parts in tensors), default=0)
    third = max((cell_len(parts[1]) for parts in tensors), default=0)
    last = max((cell_len(parts[2]) for parts in tensors), default=0)
    value = 0 if all(entry.kind != "value" for entry in entries) else _MAX_VALUE
    total = first + 2 + max(second + third + last + 4, value)
    fits = width is None or total <= width
    for entry, label, parts in zip(entries, labels, details, strict=True):
        indent = _INDENT * (entry.depth + 1)
        if entry.kind == "container":
            yield label
        elif not parts:
            name = pad(label, first) if fits else label
            yield from fold([name, _value(entry, width, indent)], width, hang=indent)
        elif fits:
            cells = (pad(label, first), pad(parts[0], second), pad(parts[1], third, right=True))
            yield _INDENT.join((*cells, parts[2]))
        else:
            yield from fold([label, *parts], width, hang=indent)


def _value(entry: Entry, width: int | None, indent: str) -> str:
    """Write a value, shorter where a line of its own is shorter."""
    limit = _MAX_VALUE
    if width is not None:
        limit = max(_MIN_VALUE, min(limit, width - len(indent)))
    return visible(short_json(entry.node, limit))


def _details(entry: Entry, manifest: Manifest) -> list[str]:
    """Write type and shape, bytes, and the place of a tensor; nothing for other entries."""
    if entry.index is None or entry.shape is None:
        return []
    kind = "numpy " if entry.kind == "array" else ""
    what = f"{kind}{entry.dtype} [{', '.join(map(str, entry.shape))}]"
    if entry.kind == "bytes":
        what = "bytes"
    if entry.tied_to is not None:
        tie = "in" if entry.is_view else "="
        return [visible(what), "-", f"{tie} {visible(entry.tied_to) or _NAMELESS}"]
    first, others = _files(manifest, entry.index)
    places = ",".join(f"#{i}" for i in first)
    if others:
        places += f" +{','.join(f'#{i}' for i in others)}"
    return [visible(what), format_nbytes(entry.nbytes or 0), places]


def _files(manifest: Manifest, index: int) -> tuple[list[int], list[int]]:
    """Number the files that have a stored tensor, and those that have copies of it."""
    chunks = manifest.tensors[index].chunks
    first = {chunk.file for chunk in chunks}
    others = {file for chunk in chunks for file, _ in chunk.copies}
    return sorted(first), sorted(others - first)

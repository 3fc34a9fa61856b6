"""An index of a manifest: its tensors by name, for `load_slice`.

A program that reads slices asks for the same manifest thousands of times, so the index is kept
beside that in the metadata cache. A search through all of the manifest took 5 ms for the last of
100,000 tensors, and 0.36 s for a tensor of bytes beside 200,000 lists, as its name is in the tree
alone; with the index, each takes 0.8 ms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptio.errors import TargetError
from ckptio.format.encode import TAG
from ckptio.state.tree import read_tree, tensor_index, walk

if TYPE_CHECKING:
    from ckptio.format.encode import Json
    from ckptio.format.manifest import Manifest, TensorEntry

#: What stored names have that are not those of the state: a number, an escape.
_SIGNS = "~\\"


class Named:
    """The tensors of a manifest by name; the metadata cache keeps it beside that.

    Made on the engine's loop, and used by callers on their threads.

    Attributes:
        manifest: As given.
        whole: Files of it that were found to have their sizes, for whoever reads with checksums.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.whole: set[int] = set()
        self._entries: dict[str, TensorEntry] | None = None
        self._nodes: dict[str, Json] | None = None

    def find(self, path: str, name: str) -> tuple[TensorEntry, Json | None]:
        """Find a tensor by its name in the state; a tied one by any of its names.

        Args:
            path: What the checkpoint is called, for the error.
            name: The name.

        Returns:
            What is stored, and the node of the view of it that has the name, if that is one.

        Raises:
            TargetError: There is none.
        """
        entries = self._entries
        if entries is None:
            entries = self._entries = {entry.name: entry for entry in self.manifest.tensors}
        entry = entries.get(name)
        if entry is not None and entry.dtype != "uint8" and not any(s in name for s in _SIGNS):
            return entry, None
        node = self._node(name)
        index = tensor_index(node)
        if index is not None and 0 <= index < len(self.manifest.tensors):
            entry = self.manifest.tensors[index]
            if not self.manifest.is_foreign:  # of those, whoever reads them says what is wrong
                _require_elements(name, node, entry)
            return entry, node if node[TAG] == "view" else None
        if entry is not None:
            return entry, None
        raise TargetError(
            f"checkpoint {path!r} has no tensor {name!r}; `ckptio show` lists what there is, and"
            " load(select=) takes other values, too"
        )

    def _node(self, name: str) -> Json:
        """Give the node that has a name in the tree; the first, should there be several."""
        nodes = self._nodes
        if nodes is None:
            nodes = {}
            for fqn, node in walk("", read_tree(self.manifest)):
                nodes.setdefault(fqn, node)
            self._nodes = nodes
        return nodes.get(name)


def _require_elements(name: str, node: Json, entry: TensorEntry) -> None:
    """Refuse what has no elements where it is stored: bytes, and arrays that are stored as such.

    Raises:
        TargetError: It is such a thing.
    """
    what = node[TAG]
    if what == "np":
        if entry.dtype != "uint8" or node["d"] == "|u1":
            return
        what = f"an array of {node['d']!r}, stored as bytes"
    elif what not in ("bytes", "bytearray"):
        return
    raise TargetError(f"{name!r} is {what}, and no tensor: load all of it, with select=")

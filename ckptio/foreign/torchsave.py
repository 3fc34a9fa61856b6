"""Files that `torch.save` wrote, through `torch.load` with `weights_only`.

What classes may be in such a file is torch's to say (`torch.serialization.safe_globals`
allows more). Here all of it is loaded; `ranged` leaves the tensors in the file, where it can.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from ckptio.errors import CheckpointChangedError, FormatError
from ckptio.foreign.archive import require_plain
from ckptio.foreign.interface import at, make_manifest
from ckptio.foreign.pickles import UnpicklingError, first_sentence
from ckptio.foreign.values import add_flat, source_of, take_apart

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from ckptio.foreign.folder import Folder
    from ckptio.format.manifest import Manifest, TensorEntry
    from ckptio.state.flatten import FlatState
    from ckptio.storage.streams import AwaitedSource, Source


class TorchSaveReader:
    """A file of `torch.save` that is loaded as a whole.

    Args:
        folder: Its directory.
        name: Its name there.
        block_nbytes: The unit in which it is read.
    """

    def __init__(self, folder: Folder, name: str, block_nbytes: int) -> None:
        self._folder = folder
        self._name = name
        self._block_nbytes = block_nbytes

    @property
    def version(self) -> Hashable:
        """See `interface.ForeignReader`."""
        return self._folder.version(self._name)

    @functools.cached_property
    def _flat(self) -> FlatState:
        """The state."""
        return self._load_whole()

    def _load_whole(self) -> FlatState:
        """Load the state into memory.

        A map would be less, but it ends the process if the file is written over in place, as
        `torch.save` itself does.

        Raises:
            FormatError: It cannot be loaded, or holds more than data.
        """
        path = self._folder.join(self._name)
        try:
            with open(path, "rb") as file:
                require_plain(file)
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=False)
        except FileNotFoundError:
            raise CheckpointChangedError(path) from None
        except UnpicklingError as error:
            raise FormatError(
                f"{path!r} holds more than data, and loading it may run anything:"
                f" {first_sentence(error)}"
            ) from None
        except FormatError as error:
            raise at(path, error) from None
        except Exception as error:  # a damaged file raises anything
            raise FormatError(f"{path!r}: torch.load cannot read it: {error}") from None
        try:
            return take_apart(state)
        except FormatError as error:
            raise at(path, error) from None

    def manifest(self) -> Manifest:
        """Take the state apart."""
        version = self.version
        status = self._folder.status(self._name)
        flat = self._flat
        files: list[tuple[str, int]] = []
        tensors: list[TensorEntry] = []
        tree = add_flat(flat, str, lambda number: f"tensor-{number}", files, tensors)
        return make_manifest(
            writer="torch.save",
            version=version,
            modified_s=status.modified_s if status is not None else 0.0,
            block_nbytes=self._block_nbytes,
            files=files,
            tensors=tensors,
            tree=tree.node,
        )

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Give the bytes of tensors."""
        return [self._flat.specs[number_of(name)].nbytes for name in names]

    def open(self, name: str, nbytes: int) -> Source | AwaitedSource:
        """Give the bytes of a tensor."""
        del nbytes  # as `sizes` said
        return source_of(self._flat.sources[number_of(name)])


def number_of(name: str) -> int:
    """Give the number of a tensor by the name of its file in the manifest."""
    return int(name.removeprefix("tensor-"))

"""Where the members of an archive of `torch.save` are that hold the elements of tensors."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptio.errors import FormatError
from ckptio.foreign.archive import LOCAL_HEADER_NBYTES, own_header_nbytes

if TYPE_CHECKING:
    from ckptio.foreign.folder import Folder


@dataclass(frozen=True, slots=True)
class Member:
    """A member of the archive that holds the elements of tensors.

    Attributes:
        start: Where they are in the file with holes.
        nbytes: Their size.
        header: Where the member's own header is in the real file.
        stop: Where the next member begins there.
        name: Its name.
    """

    start: int
    nbytes: int
    header: int
    stop: int
    name: bytes


class Members:
    """The members of one archive.

    Args:
        folder: Its directory.
        name: Its name there.
        members: They, in any order.
    """

    def __init__(self, folder: Folder, name: str, members: list[Member]) -> None:
        self._folder = folder
        self._name = name
        self._members = sorted(members, key=lambda member: member.start)
        self._starts: dict[int, int] = {}

    def real(self, position: int, nbytes: int) -> int:
        """Say where in the real file bytes of the one with holes are.

        The member's own header says where it begins; it is looked at once.

        Raises:
            FormatError: They are in no member.
        """
        number = bisect.bisect_right(self._members, position, key=lambda member: member.start) - 1
        member = self._members[number] if number >= 0 else Member(0, 0, 0, 0, b"")
        inside = position - member.start
        if inside + nbytes > member.nbytes:
            raise FormatError("a tensor is larger than its member of the archive")
        if member.header not in self._starts:
            names_stop = member.header + LOCAL_HEADER_NBYTES + len(member.name)
            header = self._folder.read_within(member.nbytes, self._name, member.header, names_stop)
            start = member.header + own_header_nbytes(header, member.name)
            if start + member.nbytes > member.stop:
                raise FormatError("the members of the archive lie over each other")
            self._starts[member.header] = start
        return self._starts[member.header] + inside

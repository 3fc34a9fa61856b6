"""Choose one of the places of a chunk that ranks keep copies of. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from ckptio.format.manifest import Chunk, Manifest


def choose_places(
    manifest: Manifest, rank: int, host: str, lost: Container[int] = ()
) -> Callable[[Chunk], tuple[int, int]]:
    """Choose among the places of chunks with copies, for a rank on a host.

    Its own file goes first: nothing has to be exchanged then. Else all ranks of a host
    choose alike, so that one of them can read for all. Where nothing is near (a job that
    was restarted on other machines), the file of the rank of the same number goes first:
    it has to be opened for what has no copies anyway. Among equals it is the first file, so
    that few are opened. One in a lost file goes where there is another.

    Returns:
        What gives the file and the start of a chunk: in the rank's own file, in one that
        its host wrote, in one that a rank of its number wrote, or in any.
    """
    hosts = manifest.hosts
    here = [0 <= f.rank < len(hosts) and hosts[f.rank] == host for f in manifest.files]
    mine = [f.rank == rank for f in manifest.files]
    own = [near and same for near, same in zip(here, mine, strict=True)]

    def place(chunk: Chunk) -> tuple[int, int]:
        main = (chunk.file, chunk.start)
        if not chunk.copies:
            return main
        places = sorted((main, *chunk.copies))
        places = [found for found in places if found[0] not in lost] or places
        for nearer in (own, here, mine):
            for found in places:
                if nearer[found[0]]:
                    return found
        return places[0]

    return place

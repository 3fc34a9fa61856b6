"""`ranks_of`: find out which ranks there are, and meet them.

In this order: a process group that is initialised; the variables that torchrun sets; else
this rank is alone. A job whose ranks are told apart by neither (or that has no store) is
told what to do rather than saved as if each rank were alone: n ranks would write n whole
checkpoints to one path.
"""

from __future__ import annotations

import hashlib
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Union, cast

from ckptio._texts import shown
from ckptio.errors import ConfigError
from ckptio.ranks.join import Place, join
from ckptio.ranks.solo import SoloRanks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Executor

    import torch

    from ckptio.ranks.board import Store
    from ckptio.ranks.interface import Deadlines, Ranks

#: Who takes part, as a caller says it.
RanksLike = Union[Literal["auto", "solo"], "torch.distributed.ProcessGroup"]
_GROUP_DIGITS = 16
_NUM_PORTS = 1 << 16


async def ranks_of(
    group: Any = None,
    *,
    environ: Mapping[str, str],
    deadlines: Deadlines,
    executor: Executor,
) -> Ranks:
    """Meet the engines of the other ranks of a job, or of a part of it.

    Every rank of the group has to call this, in the same order where there are several
    groups. torch is not imported unless it is there or torchrun's store is needed.

    Args:
        group: A process group of `torch.distributed`; the whole job if not given.
        environ: Where torchrun has put its variables: `os.environ`.
        deadlines: How long is waited for the others.
        executor: Its threads look for addresses; the store is asked on a thread of its own.

    Returns:
        The ranks, open. The caller closes them, on the same loop.

    Raises:
        ConfigError: There are several ranks and no way to meet, or this rank is not in
            the group.
        PeerLostError: Ranks did not come in time; it names them.
        RankError: The job's store cannot be used.
    """
    place = find_place(group, environ, timeout_s=deadlines.meet_s)
    if place is None:
        return SoloRanks()
    return await join(place, deadlines=deadlines, executor=executor)


def find_place(group: Any, environ: Mapping[str, str], *, timeout_s: float) -> Place | None:
    """Find out where this rank stands; None if it is alone. Waits for nothing.

    Args:
        group: See `ranks_of`.
        environ: See `ranks_of`.
        timeout_s: For how long to try to connect to the store.

    Raises:
        ConfigError: See `ranks_of`.
    """
    distributed = sys.modules.get("torch.distributed")
    if (
        distributed is not None
        and distributed.is_available()
        and (group is not None or distributed.is_initialized())
    ):
        return _in_process_group(distributed, group)
    if group is not None:
        raise ConfigError(f"ranks= is a process group of torch.distributed, not {shown(group)}")
    return _in_environment(environ, timeout_s)


def _in_process_group(distributed: Any, group: Any) -> Place | None:
    """Stand where the process group says."""
    if group is not None and not isinstance(group, distributed.ProcessGroup):
        raise ConfigError(f"ranks= is a process group that this rank is in, not {shown(group)}")
    try:
        rank, world_size = distributed.get_rank(group), distributed.get_world_size(group)
    except ValueError:
        problem = "ranks= is a process group that torch does not know; was it destroyed?"
        raise ConfigError(problem) from None
    if world_size == 1:
        return None
    members = distributed.get_process_group_ranks(group or distributed.group.WORLD)
    store = cast("Any", distributed).distributed_c10d._get_default_store()  # noqa: SLF001  # the one way to a job's store

    def open_store() -> Store:
        # a connection of its own: on a shared one, a call of the trainer that waits for
        # other ranks would keep this rank from ever meeting them
        try:
            return cast("Store", store.clone())
        except (AttributeError, NotImplementedError, RuntimeError):  # not every store can
            return cast("Store", store)

    name = "world" if len(members) == distributed.get_world_size() else _name(members)
    return Place(rank=rank, world_size=world_size, group=name, open_store=open_store)


def _name(members: list[int]) -> str:
    """Name a group by its ranks."""
    text = ",".join(map(str, members))
    return hashlib.blake2b(text.encode(), digest_size=_GROUP_DIGITS // 2).hexdigest()


def _in_environment(environ: Mapping[str, str], timeout_s: float) -> Place | None:
    """Stand where torchrun says."""
    world_size = _number(environ, "WORLD_SIZE")
    if world_size is None or world_size == 1:
        return None
    rank, port = _number(environ, "RANK"), _number(environ, "MASTER_PORT")
    if rank is None or not 0 <= rank < world_size:
        raise ConfigError(
            f"WORLD_SIZE is {world_size} and RANK is {environ.get('RANK')!r}; open the engine when"
            " torch.distributed.init_process_group was called (Lightning sets RANK no sooner), or"
            f" set RANK from 0 to {world_size - 1}; where one rank saves alone, pass ranks='solo'"
        )
    if port is not None and not 0 < port < _NUM_PORTS:
        found = shown(environ["MASTER_PORT"])
        raise ConfigError(f"MASTER_PORT must be from 1 to {_NUM_PORTS - 1}, not {found}")
    address = environ.get("MASTER_ADDR")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not address or port is None:
        raise ConfigError(
            f"there are {world_size} ranks and no store where they can meet: call"
            " torch.distributed.init_process_group first, or pass ranks='solo'"
        )
    # not TORCHELASTIC_RESTART_COUNT, too: each agent counts the failures of its own workers
    name = f"ckptio/{environ.get('TORCHELASTIC_RUN_ID', '')}"

    def open_store() -> Store:
        from torch.distributed import (  # type: ignore[attr-defined]  # noqa: PLC0415  # imports torch; its stubs leave them out
            PrefixStore,
            TCPStore,
        )

        store = TCPStore(address, port, None, False, timedelta(seconds=timeout_s))  # noqa: FBT003  # as torch has it
        return cast("Store", PrefixStore(name, store))

    return Place(rank=rank, world_size=world_size, group="env", open_store=open_store)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} must be an int, not {shown(text)}") from None

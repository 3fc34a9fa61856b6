"""`save_s3`, `load_s3` and `partial_s3`."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from bench.harness import SECONDS, Bench, case
from bench.remote import CLIENTS, LOAD_METRICS, SAVE_METRICS, SENT, Remote, config_for, opened
from bench.states import gpt_like, tiny_tensors
from bench.store import store_peers, store_server
from ckptio import Engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.harness import Subject
    from bench.store import StorePeer

#: Servers keep all of it in memory.
_SCALE = 0.15
_NOTE = (
    "Server: {server}, on this machine: it takes its share of the cores. Sums of torch's zip"
    " writer are off; ckptio always sums. The peers save and load in `to_thread`;"
    " DCP on s3fs reads through s3fs' block cache, which is faster than its default."
)


@contextlib.asynccontextmanager
async def _remote(bench: Bench) -> AsyncIterator[tuple[Remote, dict[str, Engine], str]]:
    """Run a server, an engine for each client, and make a state."""
    state = gpt_like(bench.scale * _SCALE)
    with store_server() as (name, server):
        async with contextlib.AsyncExitStack() as stack:
            stores = {c: await stack.enter_async_context(opened(server, c)) for c in CLIENTS}
            remote = Remote(server, state, stores)
            engines: dict[str, Engine] = {}
            for client in CLIENTS:
                config = config_for(server, client, remote.nbytes)
                engines[client] = await stack.enter_async_context(Engine(config))
                await engines[client].prewarm()
                await engines[client].save(tiny_tensors(4), remote.new_url())  # connects
            yield remote, engines, _NOTE.format(server=name)


@case(rounds=3)
async def save_s3(bench: Bench) -> None:
    """Time a save to a store over S3's protocol, with each of ckptio's clients.

    Against DCP on s3fs, on Amazon's connector and on multi-storage-client, and against
    sending the same bytes in parallel as plain objects. Beside the time: CPU seconds of
    this process, and how late the trainer's loop is meanwhile.
    """
    async with _remote(bench) as (remote, engines, note):
        subjects = [
            *(remote.saves_ours(engines[client], client) for client in CLIENTS),
            *(remote.saves_peer(peer) for peer in store_peers()),
            *(remote.puts_raw(client) for client in CLIENTS),
        ]
        await bench.compare(
            "save to S3", subjects, metrics=SAVE_METRICS, nbytes=remote.nbytes, note=note
        )


@case(rounds=3)
async def load_s3(bench: Bench) -> None:
    """Time a load of all tensors from a store over S3's protocol, into given memory.

    Against the same peers, each with what it saved itself, and against receiving as many
    bytes in plain ranges. What the server sends for each byte that is wanted is counted
    by a relay, in a load of its own.
    """
    async with _remote(bench) as (remote, engines, note):
        ours = remote.new_url()
        await engines[CLIENTS[0]].save(remote.state, ours)
        await remote.put_raw(ours)
        subjects = [
            *(remote.loads_ours(engines, client, ours) for client in CLIENTS),
            *(_peer_loads(bench, remote, peer) for peer in store_peers()),
            *(remote.gets_raw(client, ours) for client in CLIENTS),
        ]
        await bench.compare(
            "load from S3", subjects, metrics=LOAD_METRICS, nbytes=remote.nbytes, note=note
        )


@case(rounds=5)
async def partial_s3(bench: Bench) -> None:
    """Time a load of four tensors of about 4 MiB out of a checkpoint in a store over S3's protocol.

    Against the same peers. The manifest is known to ckptio's engine, which asks whether it
    is still the same; the peers read their metadata each time.
    """
    async with _remote(bench) as (remote, engines, note):
        ours = remote.new_url()
        await engines[CLIENTS[0]].save(remote.state, ours)
        names = list(remote.wanted)
        subjects = [
            *(remote.loads_ours(engines, client, ours, names) for client in CLIENTS),
            *(_peer_loads(bench, remote, peer, names) for peer in store_peers()),
        ]
        await bench.compare(
            "load of four tensors from S3", subjects, metrics=(SECONDS, SENT), note=note
        )


def _peer_loads(
    bench: Bench, remote: Remote, peer: StorePeer, names: list[str] | None = None
) -> Subject:
    """Save with a peer, outside any clock, and give the subject that loads that."""
    url = remote.new_url()
    subject = remote.loads_peer(peer, url, names or ())
    if subject.missing:
        return subject
    bench.say(f"{bench.case}: writing, for {peer.name}")
    try:
        peer.save(remote.server, url, remote.state)
    except Exception as error:  # it goes into the table, as what a peer raises later
        problem = f"failed: {type(error).__name__}: {error}".splitlines()[0][:120]
        return dataclasses.replace(subject, missing=problem)
    return subject

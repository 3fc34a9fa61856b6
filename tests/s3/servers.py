"""Servers that speak S3, on loopback, each for as long as its `with` block lasts.

moto is a simulation in Python: always there, quick, and no proof of anything that a store
decides atomically or checks. Ceph (a monitor, a store in memory and a gateway) and OpenStack
Swift are real ones, and differ from Amazon's where it matters: in conditions, etags, errors.
So are those in modules of their own. All state is in a temporary directory and is thrown away.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import botocore.config
import botocore.session

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

BUCKET = "ckptio"
REGION = "us-east-1"
CEPH_INSTALL = (
    "apt-get update && apt-get install -y --no-install-recommends radosgw ceph-mon ceph-osd"
)
SWIFT_INSTALL = "pip install 'swift>=2.38' setuptools"

_CEPH_PROGRAMS = (
    "ceph",
    "ceph-authtool",
    "ceph-mon",
    "ceph-osd",
    "monmaptool",
    "radosgw",
    "radosgw-admin",
)
_SWIFT_SERVICES = ("account", "container", "object", "proxy")
_READY_S = 60.0
_PROBE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that runs.

    Attributes:
        endpoint: Its URL.
        key: Name of a user who may do everything.
        secret: What proves that.
    """

    endpoint: str
    key: str = "tester"
    secret: str = "testing-secret"  # noqa: S105  # of a server that lives for one test run

    @property
    def options(self) -> dict[str, Any]:
        """What fsspec needs to get there."""
        return {
            "key": self.key,
            "secret": self.secret,
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": REGION},
        }

    def client(self) -> Any:
        """Make a client that has nothing to do with what is tested; the caller closes it."""
        return _session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name=REGION,
            verify=False,
            config=botocore.config.Config(
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": "path"},
            ),
        )

    def make_bucket(self) -> Server:
        """Make the bucket of all tests."""
        with contextlib.closing(self.client()) as client:
            client.create_bucket(Bucket=BUCKET)
        return self


@functools.cache
def _session() -> botocore.session.Session:
    """Give a session that is kept, with what it has read: that is most of making a client."""
    return botocore.session.get_session()


class Processes:
    """Programs that run until the end of a `with` block, and a directory of theirs."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.directory = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptio-s3-"))
        )
        return self

    def __exit__(self, *error: object) -> None:
        for process in reversed(self._running):  # nothing they have is kept: no need to ask
            process.kill()
        for process in self._running:
            process.wait()
        self._stack.close()

    def start(self, *command: str | Path) -> None:
        """Start a program; what it says goes to a file."""
        with (self.directory / f"{len(self._running)}.out").open("wb") as out:
            process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._running.append(process)

    def run(self, *command: str | Path) -> None:
        """Run a program to its end."""
        words = [str(word) for word in command]
        done = subprocess.run(words, check=False, capture_output=True, timeout=_READY_S, text=True)
        if done.returncode:
            raise RuntimeError(f"{words} ended with {done.returncode}: {done.stderr[-2000:]}")

    def wait(self, *urls: str) -> None:
        """Wait until something answers at each URL."""
        end = time.monotonic() + _READY_S
        for url in urls:
            while not _answers(url):
                for number, process in enumerate(self._running):
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_PROBE_S / len(self._running))
                        said = (self.directory / f"{number}.out").read_text(errors="replace")
                        raise RuntimeError(f"{process.args!r} ended: {said[-2000:]}")
                if time.monotonic() > end:
                    raise TimeoutError(f"nothing answers at {url}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):  # noqa: S310  # http on loopback
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except OSError:
        return False


def free_port() -> int:
    """Find a port that nobody has now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextlib.contextmanager
def moto() -> Iterator[Server]:
    """Run a simulation of Amazon's S3."""
    with Processes() as processes:
        port = free_port()
        server = Server(endpoint=f"http://127.0.0.1:{port}")
        program = Path(__file__).with_name("moto_server.py")
        processes.start(sys.executable, "-P", program, "-H", "127.0.0.1", "-p", str(port))
        processes.wait(server.endpoint)
        yield server.make_bucket()


def missing_ceph() -> str:
    """Say how to get Ceph; empty where it is."""
    return "" if all(map(shutil.which, _CEPH_PROGRAMS)) else CEPH_INSTALL


def missing_swift() -> str:
    """Say how to get OpenStack Swift; empty where it is."""
    programs = ("swift-proxy-server", "swift-ring-builder")
    return "" if all(map(found_program, programs)) else SWIFT_INSTALL


def found_program(program: str) -> str | None:
    """Find a program that pip installs: beside the interpreter, or on the path."""
    beside = str(Path(sys.executable).parent)
    return shutil.which(program, path=beside) or shutil.which(program)


_CEPH_CONF = """\
[global]
fsid = {fsid}
mon_initial_members = a
mon_host = [v2:127.0.0.1:{monitor}/0]
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
auth_allow_insecure_global_id_reclaim = false
keyring = {dir}/keyring
ms_bind_ipv6 = false
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
run_dir = {dir}
admin_socket = {dir}/$name.$pid.asok
log_file = {dir}/$name.log
pid_file =
crash_dir = {dir}/crash
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pgp_num = 1
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
mon_data_avail_crit = 1
mon_data_avail_warn = 2
paxos_propose_interval = 0.05
paxos_min_wait = 0.01
[mon.a]
mon_data = {dir}/mon.a
[osd]
osd_data = {dir}/osd.$id
keyring = {dir}/osd.0/keyring
osd_objectstore = memstore
memstore_device_bytes = 8589934592
[client.admin]
rgw_frontends = beast endpoint=127.0.0.1:{port}
rgw_thread_pool_size = 32
rgw_gc_obj_min_wait = 1
rgw_gc_processor_period = 1
rgw_data = {dir}/rgw
"""


@contextlib.contextmanager
def ceph() -> Iterator[Server]:
    """Run Ceph's gateway over a monitor and a store in memory."""
    with Processes() as processes:
        home, port, monitor, fsid = processes.directory, free_port(), free_port(), uuid.uuid4()
        for name in ("mon.a", "osd.0", "rgw"):
            (home / name).mkdir()
        server = Server(endpoint=f"http://127.0.0.1:{port}")
        conf, keyring, disk = home / "ceph.conf", home / "keyring", home / "osd.0/keyring"
        conf.write_text(_CEPH_CONF.format(fsid=fsid, monitor=monitor, dir=home, port=port))
        run, start = processes.run, processes.start
        run(*_new_key(keyring, "mon.", "mon"), "--create-keyring")
        run(*_new_key(keyring, "client.admin", "mon", "osd", "mgr"))
        run(*_new_key(disk, "osd.0", "osd"), "--create-keyring", "--cap", "mon", "profile osd")
        at = f"[v2:127.0.0.1:{monitor}]"
        run("monmaptool", "--create", "--fsid", str(fsid), "--addv", "a", at, home / "monmap")
        c = ("-c", conf)
        run("ceph-mon", *c, "--mkfs", "-i", "a", "--monmap", home / "monmap", "--keyring", keyring)
        start("ceph-mon", *c, "-f", "-i", "a")
        name = str(uuid.uuid4())
        run("ceph", *c, "osd", "new", name)
        run("ceph", *c, "auth", "add", "osd.0", "-i", disk)
        run("ceph-osd", *c, "-i", "0", "--mkfs", "--osd-uuid", name)
        start("ceph-osd", *c, "-f", "-i", "0")
        run("ceph", *c, "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=localhost")
        user = ("--uid=t", "--display-name=t", f"--access-key={server.key}")
        run("radosgw-admin", *c, "user", "create", *user, f"--secret={server.secret}")
        start("radosgw", *c, "-f", "-n", "client.admin")
        processes.wait(server.endpoint)
        yield server.make_bucket()


def _new_key(keyring: Path, name: str, *parts: str) -> Sequence[str | Path]:
    """Give the command that makes a key which allows everything with some parts of Ceph."""
    caps = [word for part in parts for word in ("--cap", part, "allow *")]
    return ["ceph-authtool", keyring, "--gen-key", "-n", name, *caps]


_SWIFT_CONF = """\
[swift-hash]
swift_hash_path_prefix = a
swift_hash_path_suffix = b
[storage-policy:0]
name = one
default = yes
"""
_SWIFT_NODE_CONF = """\
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
swift_dir = {dir}
conn_timeout = 30
node_timeout = 60
container_update_timeout = 60
devices = {dir}/srv
mount_check = false
fallocate_reserve = 0
disable_fallocate = true
log_level = WARNING
[pipeline:main]
pipeline = {service}-server
[app:{service}-server]
use = egg:swift#{service}
conn_timeout = 30
node_timeout = 60
recon_cache_path = {dir}/cache
"""
_SWIFT_PROXY_CONF = """\
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
swift_dir = {dir}
log_level = WARNING
[pipeline:main]
pipeline = catch_errors gatekeeper s3api tempauth bulk copy slo proxy-server
[app:proxy-server]
use = egg:swift#proxy
conn_timeout = 30
node_timeout = 60
allow_account_management = true
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:gatekeeper]
use = egg:swift#gatekeeper
[filter:s3api]
use = egg:swift#s3api
s3_acl = false
location = us-east-1
check_bucket_owner = false
auth_pipeline_check = false
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing-secret .admin
[filter:bulk]
use = egg:swift#bulk
[filter:copy]
use = egg:swift#copy
[filter:slo]
use = egg:swift#slo
"""


@contextlib.contextmanager
def swift() -> Iterator[Server]:
    """Run OpenStack Swift with its S3 interface."""
    import getpass  # noqa: PLC0415  # only here

    with Processes() as processes:
        home, user = processes.directory, getpass.getuser()
        (home / "srv/d1").mkdir(parents=True)
        (home / "cache").mkdir()
        (home / "swift.conf").write_text(_SWIFT_CONF)
        ports = {service: free_port() for service in _SWIFT_SERVICES}
        for service, port in ports.items():
            conf = _SWIFT_PROXY_CONF if service == "proxy" else _SWIFT_NODE_CONF
            text = conf.format(port=port, user=user, dir=home, service=service)
            (home / f"{service}-server.conf").write_text(text)
            if service != "proxy":
                ring = (str(found_program("swift-ring-builder")), home / f"{service}.builder")
                processes.run(*ring, "create", "6", "1", "0")
                processes.run(*ring, "add", f"r1z1-127.0.0.1:{port}/d1", "1")
                processes.run(*ring, "rebalance")
        for service in _SWIFT_SERVICES:
            program = str(found_program(f"swift-{service}-server"))
            processes.start(program, home / f"{service}-server.conf")
        processes.wait(*(f"http://127.0.0.1:{port}/" for port in ports.values()))
        server = Server(endpoint=f"http://127.0.0.1:{ports['proxy']}", key="test:tester")
        yield server.make_bucket()

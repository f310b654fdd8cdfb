"""A few hosts on one machine: network namespaces, each linked to a switch, with a name and an
/etc/hosts of its own.

::

    with cluster(2) as (first, second):
        process = second.start([sys.executable, "train.py"], folder)

All of it is in namespaces: the bridge too, which has one of its own. Where they are deleted, their
links go with them, so that nothing stays behind. It needs root, and the `ip` command.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_numbers = itertools.count()


@dataclass
class Host:
    """One host.

    Attributes:
        name: its hostname, under which the others know it.
        address: its address in the cluster's network, which is on its link ``eth0``.
        namespace: its network namespace.
        switch: the namespace of the bridge.
        own: a folder with what is its own: ``hosts``, and what it has on its own disk.
    """

    name: str
    address: str
    namespace: str
    switch: str
    own: Path

    def words(self, command: Sequence[str | Path], own_disk: Path | None = None) -> list[str]:
        """The words that run a command here.

        Args:
            command: what to run.
            own_disk: a folder under which this host sees a disk of its own; the others don't see
                what is there.
        """
        steps = [f"mount --bind {self.own}/hosts /etc/hosts", f"hostname {self.name}"]
        if own_disk is not None:
            self.disk.mkdir(exist_ok=True)
            steps.append(f"mount --bind {self.disk} {own_disk}")
        # What is mounted is seen by this command alone: ip gives it a mount namespace.
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c"]
        return [*inside, " && ".join([*steps, 'exec "$@"']), "sh", *map(str, command)]

    def start(
        self,
        command: Sequence[str | Path],
        folder: Path,
        env: Mapping[str, str] | None = None,
        *,
        own_disk: Path | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start a command here, as ``words`` tell, in a folder, with these further variables."""
        words = self.words(command, own_disk)
        return subprocess.Popen(
            words, cwd=folder, env={**os.environ, **(env or {})}, text=True, **options
        )

    @property
    def disk(self) -> Path:
        """Where the test sees what is on this host's own disk."""
        return self.own / "disk"

    def cut_off(self) -> None:
        """Pull the cable."""
        _ip("-n", self.switch, "link", "set", self.name, "down")

    def bring_back(self) -> None:
        """Put it in again."""
        _ip("-n", self.switch, "link", "set", self.name, "up")

    def slow_down(self) -> None:
        """Make its link slow, in both directions: late where the kernel has netem, else of 10
        Mbit/s.
        """
        for where, link in ((self.namespace, "eth0"), (self.switch, self.name)):
            add = ["tc", "-n", where, "qdisc", "add", "dev", link, "root"]
            late = [*add, "netem", "delay", "20ms", "rate", "10mbit"]
            if subprocess.run(late, capture_output=True, check=False).returncode:
                subprocess.run(
                    [*add, "tbf", "rate", "10mbit", "burst", "4kb", "latency", "2s"], check=True
                )

    @property
    def processes(self) -> list[int]:
        """The numbers of the processes that run here."""
        return [int(word) for word in _ip("netns", "pids", self.namespace).split()]

    def kill(self) -> None:
        """End all that runs here, as a machine that goes down; its network stays."""
        while found := self.processes:
            for number in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.05)

    def listening(self) -> set[tuple[str, int]]:
        """The addresses and ports at which processes here wait for connections: ``("0.0.0.0",
        29500)``.
        """
        rows = subprocess.run(
            ["ip", "netns", "exec", self.namespace, "cat", "/proc/net/tcp", "/proc/net/tcp6"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        found = set()
        for _, local, _, state, *_ in (row.split() for row in rows if "address" not in row):
            address, _, port = local.partition(":")
            if state == "0A":
                whole = [
                    int(address[-8:][i : i + 2], 16) for i in (6, 4, 2, 0)
                ]  # IPv4, or IPv4 within IPv6
                found.add((".".join(map(str, whole)), int(port, 16)))
        return found


@contextlib.contextmanager
def cluster(size: int, folder: Path, *, own_name_is_loopback: bool = False) -> Iterator[list[Host]]:
    """Hosts ``host0``, ``host1`` and so on, at 10.77.0.1, 10.77.0.2 and so on; skips a test where
    none can be made.

    Args:
        size: how many.
        folder: for the files that each has of its own.
        own_name_is_loopback: a host's own name is 127.0.1.1 to itself, as Debian sets it up.
    """
    switch = f"lockstep-{os.getpid()}-{next(_numbers)}"
    if shutil.which("ip") is None:
        pytest.skip("no network namespace can be made: there is no ip command")
    made = subprocess.run(
        ["ip", "netns", "add", switch], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no network namespace can be made: {made.stderr.strip()}")
    hosts: list[Host] = []
    try:
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number in range(size):
            own = folder / f"host{number}-own"
            own.mkdir(parents=True)
            host = Host(
                f"host{number}", f"10.77.0.{number + 1}", f"{switch}-host{number}", switch, own
            )
            _ip("netns", "add", host.namespace)
            hosts.append(host)
            _ip(
                *f"-n {switch} link add {host.name} type veth peer name eth0 netns "
                f"{host.namespace}".split()
            )
            _ip(*f"-n {switch} link set {host.name} master bridge up".split())
            _ip(*f"-n {host.namespace} address add {host.address}/24 dev eth0".split())
            for link in ("lo", "eth0"):
                _ip("-n", host.namespace, "link", "set", link, "up")
        for host in hosts:
            lines = [f"127.0.1.1 {host.name}"] if own_name_is_loopback else []
            lines += [
                f"{one.address} {one.name}"
                for one in hosts
                if not (own_name_is_loopback and one is host)
            ]
            (host.own / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        yield hosts
    finally:
        for host in hosts:
            host.kill()
            _ip("netns", "delete", host.namespace)
        _ip("netns", "delete", switch)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout

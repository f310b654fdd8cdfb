"""docs/clusters.md and examples/clusters/: the files run, with stand-ins for ssh, srun and
scontrol on the path.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hosts import Host, cluster
from test_hosts import (
    ENVIRONMENT,
    JOB,
    TRAIN,
    ended,
    expected,
    lines_of_metrics,
    model_in,
    until,
    watched,
)
from torch.distributed.run import get_args_parser

from docs_pages import ROOT, blocks
from lockstep.cli import command

__all__ = ["expected"]  # a fixture

CLUSTERS = ROOT / "examples" / "clusters"

SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
case $host in
CASES
esac
"""

SRUN = """#!PYTHON
import os, subprocess, sys

words = sys.argv[1:]
while words[0].startswith("-"):
    del words[0]
hosts = HOSTS
tasks = []
for node, host in enumerate(hosts):
    for local in range(2):
        said = {"PROCID": 2 * node + local, "LOCALID": local, "NODEID": node, "NTASKS": 2 * len(hosts)}
        said |= {"STEP_NUM_TASKS": 2 * len(hosts), "STEP_TASKS_PER_NODE": f"2(x{len(hosts)})"}
        environment = os.environ | {f"SLURM_{name}": str(value) for name, value in said.items()}
        tasks.append(subprocess.Popen([*host, *words], env=environment))
sys.exit(max(abs(task.wait()) for task in tasks))
"""

SCONTROL = """#!/bin/sh
case "$1 $2" in
"show hostnames") printf 'host0\\nhost1\\n' ;;
"show job") echo "   JobState=RUNNING Reason=None" ;;
requeue*) echo "$2" >>requeued ;;
esac
"""


def stand_ins(hosts: Sequence[Host], folder: Path) -> dict[str, str]:
    """The environment in which ssh, srun and scontrol lead to these hosts."""
    cases = "\n".join(
        f'{host.name}) exec {shlex.join(host.words(["sh", "-c"]))} "$*" ;;' for host in hosts
    )
    srun = SRUN.replace("PYTHON", sys.executable).replace(
        "HOSTS", repr([host.words([]) for host in hosts])
    )
    path = folder / "path"
    path.mkdir()
    for name, text in {
        "ssh": SSH.replace("CASES", cases),
        "srun": srun,
        "scontrol": SCONTROL,
    }.items():
        (path / name).write_text(text)
        (path / name).chmod(0o755)
    search = os.pathsep.join([str(path), os.environ["PATH"]])
    return {**os.environ, **ENVIRONMENT, "PATH": search, "PYTHON": sys.executable}


def begun(
    words: Sequence[str | Path], folder: Path, environment: dict[str, str]
) -> subprocess.Popen[str]:
    (folder / "job.py").write_text(JOB)
    return subprocess.Popen(
        list(map(str, words)),
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.slow
def test_torchrun_over_ssh(tmp_path: Path, expected: Any) -> None:
    with cluster(2, tmp_path) as hosts:
        environment = stand_ins(hosts, tmp_path) | {"HOSTS": "host0 host1", "RANKS": "2"}
        words = ["job.py", "--strategy", "ddp", "--devices", "cpu", "--set", "pause=0"]
        ended([begun([CLUSTERS / "torchrun_ssh.sh", *words], tmp_path, environment)])
    assert model_in(tmp_path / "runs") == expected(8)


@pytest.mark.slow
def test_srun_makes_the_ranks_and_opens_only_what_the_page_says(
    tmp_path: Path, expected: Any
) -> None:
    with cluster(2, tmp_path, own_name_is_loopback=True) as hosts:
        environment = stand_ins(hosts, tmp_path) | {
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": "20123",
        }
        process = begun(["srun", sys.executable, *TRAIN, "--devices", "cpu"], tmp_path, environment)
        listening = watched(hosts, [process])
        ended([process])
    assert model_in(tmp_path / "runs") == expected(8)
    for host, places in zip(hosts, listening, strict=True):
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        gloos = {
            (address, port)
            for address, port in places
            if address == host.address and low <= port <= high
        }
        assert len(gloos) >= 2
        assert places - gloos == ({("0.0.0.0", 20123)} if host is hosts[0] else set())


@pytest.mark.slow
def test_an_sbatch_job_is_saved_before_its_time_limit_and_goes_on(
    tmp_path: Path, expected: Any
) -> None:
    with cluster(2, tmp_path) as hosts:
        environment = stand_ins(hosts, tmp_path) | {
            "SLURM_JOB_NODELIST": "host[0-1]",
            "SLURM_JOB_ID": "40123",
        }
        words = [
            "bash",
            CLUSTERS / "slurm.sbatch",
            "job.py",
            "--strategy",
            "ddp",
            "--devices",
            "cpu",
        ]
        process = begun([*words, "--set", "pause=0.1"], tmp_path, environment)
        until(lambda: lines_of_metrics(tmp_path) >= 1, [process])
        for number in (number for host in hosts for number in host.processes):
            os.kill(number, signal.SIGUSR1)
        ended([process], 143)
        assert (tmp_path / "requeued").read_text() == "40123\n"
        ended([begun([*words, "--set", "pause=0.1"], tmp_path, environment)])
    assert model_in(tmp_path / "runs") == expected(8)


@pytest.mark.parametrize("file", ["torchrun_ssh.sh", "slurm.sbatch"])
def test_the_scripts_are_written_for_bash(file: str) -> None:
    assert (CLUSTERS / file).read_text().startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", CLUSTERS / file], check=True)


def test_the_command_of_the_kubernetes_job_is_one() -> None:
    yaml = pytest.importorskip("yaml")
    service, job, policy = yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    run, of_torch, torchrun = container["command"]
    assert [run, of_torch, torchrun] == ["python3", "-m", "torch.distributed.run"]
    words = [word.replace("$(NODE_RANK)", "1") for word in container["args"]]
    assert "NODE_RANK" in [variable["name"] for variable in container["env"]]
    options = get_args_parser().parse_args(words)
    assert job["spec"]["completionMode"] == "Indexed"
    assert int(options.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(options.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    names = job["metadata"]["name"], pod["spec"]["subdomain"], service["metadata"]["name"]
    assert options.master_addr == f"{names[0]}-0.{names[1]}" and names[1] == names[2]
    (label,) = service["spec"]["selector"].items()
    assert label in pod["metadata"]["labels"].items() and policy["spec"]["podSelector"][
        "matchLabels"
    ] == dict([label])
    assert (options.module, options.training_script) == (True, "lockstep")
    parsed, unknown = command._parser()[0].parse_known_args(options.training_script_args)
    assert (parsed.command, parsed.strategy, unknown) == ("train", "ddp", [])
    assert parsed.folder in [mount["mountPath"] for mount in container["volumeMounts"]]


# The firewall


def reaches(source: Host, address: str, port: int) -> bool:
    code = f"import socket; socket.create_connection(({address!r}, {port}), timeout=2)"
    return (
        source.start([sys.executable, "-c", code], source.own, stderr=subprocess.DEVNULL).wait()
        == 0
    )


@pytest.mark.slow
def test_the_firewall_lets_in_the_cluster_and_nobody_else(tmp_path: Path) -> None:
    if shutil.which("nft") is None:
        pytest.skip("there is no nft")
    (block,) = (block for block in blocks(ROOT / "docs" / "clusters.md") if block.language == "nft")
    (tmp_path / "firewall").write_text(block.text)
    listen = (
        "import socket, time; found = [socket.create_server(('', p)) for p in (22, 29400, "
        "29500, 40000)]; print()"
    )
    with cluster(3, tmp_path) as (first, second, outside):
        for host, address in ((second, "10.78.0.2/24"), (outside, "10.78.0.3/24")):
            host.start(["ip", "address", "add", address, "dev", "eth0"], tmp_path).wait()
        server = second.start(
            [sys.executable, "-uc", f"{listen}; time.sleep(100)"], tmp_path, stdout=subprocess.PIPE
        )
        assert server.stdout is not None and server.stdout.readline() == "\n"
        assert all(reaches(outside, "10.78.0.2", port) for port in (22, 29400, 29500, 40000))
        for words in (
            ["nft", "-c", "-f", "firewall"],
            ["nft", "-f", "firewall"],
            ["nft", "-f", "firewall"],
        ):
            assert second.start(words, tmp_path).wait() == 0
        assert [reaches(outside, "10.78.0.2", port) for port in (22, 29400, 29500, 40000)] == [
            True
        ] + [False] * 3
        assert all(reaches(first, second.address, port) for port in (22, 29400, 29500, 40000))
        server.kill()
        server.communicate()


def test_every_file_that_the_page_names_is_there() -> None:
    page = ROOT / "docs" / "clusters.md"
    for place in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / place).exists(), place

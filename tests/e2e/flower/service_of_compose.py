"""A service of `deploy/container/compose.yaml` as a process: its command, user, environment, volumes and read-only root.

Called with the name of the service, the folder of the project, and the port of its metrics: containers have networks of their own,
these processes share one. It needs root, for namespaces of mounts; the process itself runs as the user of the file, without any
capability. The image is what the tests themselves run in.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml

import fedprompt

DEPLOY = Path(__file__).parents[3] / "deploy" / "container"
OWN = {"tmp", "var", "root", "home"}  # top folders that a container does not share with this machine
NEEDED = {Path(sys.prefix), Path(sys.base_prefix), Path(fedprompt.__file__).parents[1]}


def variables(service: dict[str, Any]) -> dict[str, str]:
    """Those of the image and of the file."""
    (lines,) = re.findall(r"^ENV (PATH=.*?)\nUSER", (DEPLOY / "Dockerfile").read_text(), re.DOTALL | re.MULTILINE)
    found = dict(re.findall(r"(\w+)=(\S+)", lines))
    here = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "PYTHONPATH": str(Path(fedprompt.__file__).parents[1])}
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    return {**found, **service.get("environment", {}), **here, **quiet}


def mounts(service: dict[str, Any], project: Path, root: Path) -> list[str]:
    """Commands that make its file system."""
    made = [f"mount -t tmpfs -o mode=755 tmpfs {root}"]
    for top in sorted(Path("/").iterdir()):
        if top.is_symlink():
            made.append(f"ln -s {os.readlink(top)} {root}{top}")
        elif top.is_dir():
            shared = f"mount --rbind {top} {root}{top} && mount -o remount,bind,ro {root}{top}"
            made += [f"mkdir -p {root}{top}", "true" if top.name in OWN else shared]
    inside = [path for path in sorted(NEEDED) if path.parts[1] in OWN]
    made += [f"mkdir -p {root}{path} && mount --bind {path} {root}{path}" for path in inside]
    made.append(f"mount -t tmpfs -o mode=1777 tmpfs {root}/tmp")  # `tmpfs:` of the file
    for volume in ("/var/lib/fedprompt", "/var/cache/fedprompt"):  # `VOLUME` of the image
        made += [f"mkdir -p {root}{volume}", f"mount -t tmpfs -o mode=700,uid=10001,gid=10001 tmpfs {root}{volume}"]
    for volume in service["volumes"]:
        source, target, *mode = volume.split(":")
        if source.startswith("."):
            made += [f"mkdir -p {root}{target}", f"mount --bind {project / source} {root}{target}"]
            made += [f"mount -o remount,bind,ro {root}{target}"] if mode == ["ro"] else []
    return [*made, f"mount -o remount,ro {root}"]


def main(name: str, project: str, port: str) -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"][name]
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    user, group = service["user"].split(":")
    command = [port if word == "9464" else word for word in service["command"]]
    root = Path(project) / f"root-of-{name}"
    root.mkdir()
    given = [f"{key}={value}" for key, value in variables(service).items()]
    rights = f"--reuid {user} --regid {group} --clear-groups --bounding-set=-all --no-new-privs"
    program = ["env", "-i", "-C", "/var/lib/fedprompt", *given, sys.executable, "-m", "fedprompt.cli", *command]
    last = f"exec chroot {root} setpriv {rights} {shlex.join(program)}"
    script = "\n".join([*mounts(service, Path(project), root), last])
    os.execvp("unshare", ["unshare", "-m", "--propagation", "private", "sh", "-ec", script])


if __name__ == "__main__":
    main(*sys.argv[1:])

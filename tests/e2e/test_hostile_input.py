"""Files that mean harm, through the command line: one message, a documented exit code and no traceback."""

from __future__ import annotations

import sqlite3
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from warm_processes import command_line

pytestmark = pytest.mark.e2e


def refused(done: subprocess.CompletedProcess[str], code: int, words: str) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    message = done.stderr.strip()
    assert message.startswith("error: ")
    assert len(message.splitlines()) == 1
    assert len(message) < 1000
    assert words in message


def test_a_yaml_bomb(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    refused(command_line(tmp_path)("validate", "bomb.yaml"), 2, "must not hold aliases")


def test_a_manifest_without_end(tmp_path: Path, config: Callable[..., str]) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    name = config(partition={"scheme": "manifest", "manifest": "deep.json"})
    refused(command_line(tmp_path)("partition", name), 3, "levels of brackets")


def test_a_weight_file_that_promises_a_terabyte(tmp_path: Path, config: Callable[..., str]) -> None:
    header = b'{"a":{"dtype":"F32","shape":[274877906944],"data_offsets":[0,1099511627776]}}'
    (tmp_path / "bomb.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    half = [0.5, 0.5, 0.5]
    name = config(backbone={"name": "bomb.safetensors", "mean": half, "std": half})
    refused(command_line(tmp_path)("run", name, "--quiet"), 4, "must fill the body of 0 bytes")


def test_an_image_that_promises_two_gigapixels(tmp_path: Path, config: Callable[..., str]) -> None:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    bomb = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )
    for label in ("cat", "dog"):
        for number in range(8):
            path = tmp_path / "set" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bomb)
    name = config(data={"source": "set"}, partition={"scheme": "iid", "clients": 2})
    refused(command_line(tmp_path)("run", name, "--quiet"), 3, "image must be readable: set/")


def test_a_run_file_cut_short_or_forged(tmp_path: Path, config: Callable[..., str]) -> None:
    call, name = command_line(tmp_path), config(federation={"rounds": 1})
    assert call("run", name, "--quiet").returncode == 0
    (path,) = (tmp_path / "runs").glob("*/run.db")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    for command in (("compare", "runs"), ("report", "runs"), ("run", name, "--resume", "--quiet")):
        refused(call(*command), 5, "run.db")
    path.write_bytes(whole)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE server_state SET shared = x'ffffffffffffff7f'")
    connection.close()
    refused(call("run", name, "--resume", "--quiet", "federation.rounds=1"), 5, "damaged")

"""The schema of a run file: the tables of every format version, their columns and their types."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from types import UnionType

VERSION = 3
READABLE = (
    1,
    2,
    VERSION,
)  # version 1 has no table for the pool, versions 1 and 2 have no digests; neither can be resumed

_OLD = """
CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE rounds (
  round INTEGER PRIMARY KEY, cohort TEXT NOT NULL, loss REAL, bytes_down INTEGER NOT NULL, bytes_up INTEGER NOT NULL,
  summary TEXT, seconds TEXT NOT NULL);
CREATE TABLE evaluations (round INTEGER NOT NULL, client INTEGER NOT NULL, result TEXT NOT NULL, PRIMARY KEY (round, client)) WITHOUT ROWID;
CREATE TABLE client_states (client INTEGER PRIMARY KEY, round INTEGER NOT NULL, tensors BLOB NOT NULL);
CREATE TABLE server_state (only INTEGER PRIMARY KEY CHECK (only = 0), round INTEGER NOT NULL, shared BLOB NOT NULL, own BLOB NOT NULL);
CREATE TABLE events (round INTEGER NOT NULL, client INTEGER, kind TEXT NOT NULL, detail TEXT NOT NULL);
"""
_OLD_POOL = """
CREATE TABLE pool (client INTEGER PRIMARY KEY, round INTEGER NOT NULL, kind TEXT NOT NULL, row BLOB NOT NULL);
CREATE TABLE pool_cells (only INTEGER PRIMARY KEY CHECK (only = 0), round INTEGER NOT NULL, centres BLOB NOT NULL);
"""
# a digest comes before long columns, so SQLite can read it without them
SCHEMA = """
CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE rounds (
  round INTEGER PRIMARY KEY, digest BLOB NOT NULL, cohort TEXT NOT NULL, loss REAL, bytes_down INTEGER NOT NULL,
  bytes_up INTEGER NOT NULL, summary TEXT, seconds TEXT NOT NULL, evaluations BLOB NOT NULL);
CREATE TABLE evaluations (
  round INTEGER NOT NULL, client INTEGER NOT NULL, digest BLOB NOT NULL, result TEXT NOT NULL,
  PRIMARY KEY (round, client)) WITHOUT ROWID;
CREATE TABLE client_states (
  client INTEGER PRIMARY KEY, round INTEGER NOT NULL, digest BLOB NOT NULL, tensors BLOB NOT NULL);
CREATE TABLE server_state (
  only INTEGER PRIMARY KEY CHECK (only = 0), round INTEGER NOT NULL, digest BLOB NOT NULL, shared BLOB NOT NULL,
  own BLOB NOT NULL);
CREATE TABLE events (
  number INTEGER PRIMARY KEY, round INTEGER NOT NULL, client INTEGER, kind TEXT NOT NULL, digest BLOB NOT NULL,
  detail TEXT NOT NULL);
CREATE TABLE pool (
  client INTEGER PRIMARY KEY, round INTEGER NOT NULL, kind TEXT NOT NULL, digest BLOB NOT NULL, row BLOB NOT NULL);
CREATE TABLE pool_cells (
  only INTEGER PRIMARY KEY CHECK (only = 0), round INTEGER NOT NULL, digest BLOB NOT NULL, centres BLOB NOT NULL);
CREATE TABLE links (number INTEGER PRIMARY KEY, link BLOB NOT NULL, parts TEXT NOT NULL);
"""
SCHEMAS = {1: _OLD, 2: _OLD + _OLD_POOL, VERSION: SCHEMA}

# the columns covered by a digest, in this order, with their types; a row of events is identified by its row number
COLUMNS: Mapping[str, Mapping[str, type | UnionType]] = {
    "rounds": {
        "round": int,
        "cohort": str,
        "loss": float | None,
        "bytes_down": int,
        "bytes_up": int,
        "summary": str | None,
        "seconds": str,
        "evaluations": bytes,
    },
    "evaluations": {"round": int, "client": int, "result": str},
    "client_states": {"client": int, "round": int, "tensors": bytes},
    "server_state": {"only": int, "round": int, "shared": bytes, "own": bytes},
    "events": {"rowid": int, "round": int, "client": int | None, "kind": str, "detail": str},
    "pool": {"client": int, "round": int, "kind": str, "row": bytes},
    "pool_cells": {"only": int, "round": int, "centres": bytes},
}
NEW_COLUMNS = {"rounds": {"evaluations": "x''"}}  # their values in files without digests

Definitions = dict[tuple[str, str], str]  # the SQL that created every table, by kind and name


@cache
def definitions(version: int) -> Definitions:
    """The schema of a version as SQLite stores it."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMAS[version])
        rows = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
        return {(kind, name): plain_sql(sql) for kind, name, sql in rows}


def plain_sql(text: str | None) -> str:
    """SQL with normalised spaces."""
    return " ".join((text or "").split())

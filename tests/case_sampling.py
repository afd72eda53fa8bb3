"""Which cases of a test with many long ones `make test` has time for.

A test marked `sampled` is run by `make test` on about a quarter of its cases, and by `make test-slow` on the others. The names
of the test and of the case decide, and nothing else: a new method, another order or a selection moves no other case. Tests fall
into four groups, and so do cases; a case runs in the tests of one group. So each method is in some.
"""

from __future__ import annotations

from zlib import crc32

GROUPS = 4


def is_left_for_later(test: str, case: str) -> bool:
    return (_group(test) + _group(case)) % GROUPS != 0


def _group(name: str) -> int:
    """From the middle bits: by the last ones no test of the matrix falls into the third group."""
    return crc32(name.encode()) // 16 % GROUPS

"""Which DICOM files are of one patient: their headers say it where nothing else does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedprompt.data.sources import dicom


def groups_of_patients(root: Path, files: Sequence[str]) -> np.ndarray | None:
    """A number for each file, the same for files of one patient; None where there are no DICOM files.

    A file that names no patient is a group of its own.
    """
    if not any(file.lower().endswith(dicom.SUFFIXES) for file in files):
        return None
    seen: dict[str, int] = {}
    found = []
    for number, file in enumerate(files):
        code = dicom.patient_of(root / file) if file.lower().endswith(dicom.SUFFIXES) else None
        found.append(seen.setdefault(code or f"file {number}", len(seen)))
    return np.array(found, dtype=np.int64)

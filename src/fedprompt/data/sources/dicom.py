"""DICOM files: one grey or colour picture each, as a screen would show it. Nothing of the header but what that takes is read.

    stored value -> slope x + intercept -> window of centre c and width w -> 0..255, turned around for MONOCHROME1
    LINEAR  y = ((x - (c - 0.5)) / (w - 1) + 0.5)        (DICOM PS3.3, C.11.2.1.2)

Without a window the smallest and the largest value of the picture are black and white. A file that cannot be read is named
with the kind of fault alone: the texts of errors may hold what the header says of a patient.
"""

from __future__ import annotations

import hashlib
import io
import logging
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedprompt.errors import ConfigError, broken
from fedprompt.io.bounded_read import read_bytes

SUFFIXES = (".dcm", ".dicom")
MOST_BYTES = 512 * 2**20  # of a file
PREAMBLE = 132  # bytes before the data, which end with DICM
SYNTAXES = {  # transfer syntaxes whose size is known before anything is decoded
    "1.2.840.10008.1.2": "implicit, little endian",
    "1.2.840.10008.1.2.1": "explicit, little endian",
    "1.2.840.10008.1.2.2": "explicit, big endian",
    "1.2.840.10008.1.2.5": "RLE lossless",
    "1.2.840.10008.1.2.4.50": "JPEG baseline",
    "1.2.840.10008.1.2.4.90": "JPEG 2000 lossless",
    "1.2.840.10008.1.2.4.91": "JPEG 2000",
}
BEGINNINGS = (b"\xff\xd8", b"\xff\x4f")  # of JPEG and of the bare JPEG 2000, whose size is said once
ROUNDED = 128  # bytes by which run lengths may be longer
SYNTAX = 0x10  # element of group 2
SHORT = {b"AE", b"SH", b"UI", b"UL"}  # kinds of elements in group 2, with lengths of two bytes
LONG = {b"OB", b"UR"}  # the same of four bytes
GREY = {"MONOCHROME1", "MONOCHROME2"}
COLOUR = {"RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT"}
TAGS = [
    *("Rows", "Columns", "SamplesPerPixel", "NumberOfFrames", "PhotometricInterpretation", "PlanarConfiguration"),
    *("BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PixelData", "FloatPixelData"),
    *("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence", "WindowCenter", "WindowWidth", "VOILUTFunction"),
    *("VOILUTSequence", "SmallestImagePixelValue"),
]

Array = np.ndarray[Any, np.dtype[Any]]


def library() -> Any:
    """The package pydicom, silent: its warnings may quote a header."""
    try:
        import pydicom
    except ModuleNotFoundError as error:
        raise ConfigError("DICOM files need the package pydicom: pip install 'fedprompt[medical]'") from error
    pydicom.config.settings.reading_validation_mode = pydicom.config.IGNORE
    logging.getLogger("pydicom").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module=r"pydicom\b")
    return pydicom


def decode_dicom(path: Path, most_pixels: int, longest_side: int) -> Image.Image:
    """The picture in RGB. A ValueError says what is wrong, without a word of the header's text."""
    pydicom = library()
    content = read_bytes(path, MOST_BYTES)
    header = _read(pydicom, content, [tag for tag in TAGS if not tag.endswith("PixelData")])
    _check(header, most_pixels, longest_side)
    whole = _read(pydicom, content, TAGS)
    if not _fits(pydicom, whole):
        raise ValueError("its picture must be of the size in its header")
    try:
        stored = pydicom.pixels.pixel_array(whole)
        values = pydicom.pixels.apply_modality_lut(stored, whole) if _is_grey(header) else stored
        if "VOILUTSequence" in whole and not _window(whole) and _is_grey(header):
            values = pydicom.pixels.apply_voi(values, whole)
    except Exception as error:
        raise ValueError(f"its pixels cannot be read ({type(error).__name__})") from None
    if not _is_grey(header):
        if values.dtype != np.uint8:
            raise ValueError("colours must have eight bits")
        return Image.fromarray(values, "RGB")
    grey = shown(values.astype(np.float64), _window(whole), str(header.get("VOILUTFunction") or "LINEAR"))
    if header.PhotometricInterpretation == "MONOCHROME1":
        grey = 1 - grey
    return Image.fromarray(np.rint(255 * grey).astype(np.uint8)).convert("RGB")


def patient_of(path: Path) -> str | None:
    """A code for the patient of a file, the same for all of the patient's files; None where the file names none.

    Files are read up to this tag. The code is a digest, so that no identifier is kept.
    """
    pydicom = library()
    try:
        with path.open("rb") as stream:
            _syntax(stream.read(2**16))
            stream.seek(0)
            found = pydicom.dcmread(stream, stop_before_pixels=True, specific_tags=["PatientID"])
            identifier = str(found.get("PatientID") or "").strip()
    except Exception:  # `decode_dicom` says what is wrong
        return None
    return hashlib.sha256(identifier.encode(errors="replace")).hexdigest() if identifier else None


def shown(values: Array, window: tuple[float, float] | None, function: str = "LINEAR") -> Array:
    """Values in 0..1 as a window shows them."""
    if window is None:
        low, high = float(values.min()), float(values.max())
        return (values - low) / (high - low) if high > low else np.zeros_like(values)
    centre, width = window
    if function == "SIGMOID":
        return np.asarray(1 / (1 + np.exp(np.clip(-4 * (values - centre) / width, -700, 700))))
    if function == "LINEAR_EXACT":
        return np.clip((values - centre) / width + 0.5, 0, 1)
    return np.clip((values - (centre - 0.5)) / max(width - 1, 1e-9) + 0.5, 0, 1)


def _read(pydicom: Any, content: bytes, tags: list[str]) -> Any:
    _syntax(content)
    try:
        found = pydicom.dcmread(io.BytesIO(content), specific_tags=tags)
        for tag in tags:  # values are parsed when they are asked for
            found.get(tag)
    except Exception as error:
        raise ValueError(f"it is no DICOM file that can be read ({type(error).__name__})") from None
    return found


def _syntax(content: bytes) -> None:
    """Raise unless the file begins as DICOM does, in a transfer syntax that cannot grow without bound when it is read.

    The elements of group 2, which come first, are always explicit and little endian. What pydicom might read in another way than
    this function is refused: else it could find another transfer syntax there.
    """
    if content[PREAMBLE - 4 : PREAMBLE] != b"DICM":
        raise ValueError("it is no DICOM file")
    place, syntaxes = PREAMBLE, list[str]()
    while len(head := content[place : place + 12]) == 12 and head[:2] == b"\2\0":
        element, kind, length, begin = *struct.unpack("<H2sH", head[2:8]), place + 8
        if kind in LONG:
            begin, length = place + 12, struct.unpack("<I", head[8:])[0]
        elif kind not in SHORT:
            raise ValueError("its group 2 must have elements of the kinds AE, OB, SH, UI, UL and UR alone")
        if element == SYNTAX:
            syntaxes.append(content[begin : begin + length].rstrip(b"\0 ").decode("ascii", "replace"))
        place = begin + length
    if place + 12 > len(content):
        raise ValueError("its group 2 must end before the file, and soon")
    if len(syntaxes) != 1 or syntaxes[0] not in SYNTAXES:
        raise ValueError(f"its transfer syntax must be one of: {', '.join(SYNTAXES.values())}")


def _check(header: Any, most_pixels: int, longest_side: int) -> None:
    try:
        rows, columns = int(header.Rows), int(header.Columns)
        frames, samples = int(header.get("NumberOfFrames") or 1), int(header.SamplesPerPixel)
        kind, bits = str(header.PhotometricInterpretation), int(header.BitsAllocated)
    except (AttributeError, TypeError, ValueError):
        raise ValueError("it has no picture") from None
    if frames != 1:
        raise ValueError(f"must be one picture, got {frames} frames")
    if not (min(rows, columns) >= 1 and max(rows, columns) <= longest_side and rows * columns <= most_pixels):
        rule = f"have sides of 1 to {longest_side} and at most {most_pixels} pixels"
        raise ValueError(broken("size", rule, (columns, rows)))
    if kind not in GREY | COLOUR or samples != (1 if kind in GREY else 3):
        raise ValueError("must be grey (MONOCHROME1 or 2, one sample) or coloured (RGB or YBR, three samples)")
    if bits not in (8, 16, 32):
        raise ValueError(broken("bits of a sample", "be 8, 16 or 32", bits))


def _fits(pydicom: Any, whole: Any) -> bool:
    """Whether a compressed picture has the size that was checked. What cannot be read at all is found by pydicom."""
    syntax = whole.file_meta.TransferSyntaxUID
    if not syntax.is_compressed or "PixelData" not in whole:
        return True
    try:
        frame = bytes(pydicom.encaps.get_frame(whole.PixelData, 0, number_of_frames=1))
        if syntax == pydicom.uid.RLELossless:
            return _unrolls_within(frame, 2 * whole.Rows * whole.Columns + ROUNDED)
        with Image.open(io.BytesIO(frame), formats=("JPEG", "JPEG2000")) as picture:
            return frame.startswith(BEGINNINGS) and bool(picture.size == (whole.Columns, whole.Rows))
    except Exception:
        return False


def _unrolls_within(frame: bytes, most: int) -> bool:
    """Whether no segment of run lengths becomes longer than that. A byte n < 128 stands for n + 1 bytes, n > 128 for 257 - n."""
    count, *offsets = struct.unpack("<16L", frame[:64])
    ends = [*offsets[1:count], len(frame)]
    for begin, end in zip(offsets[:count], ends, strict=True):
        place, length, end = begin, 0, min(end, len(frame))
        while place < end:
            byte = frame[place]
            length += byte + 1 if byte < 128 else 257 - byte if byte > 128 else 0
            place += byte + 2 if byte < 128 else 2 if byte > 128 else 1
            if length > most:
                return False
    return True


def _is_grey(header: Any) -> bool:
    return str(header.PhotometricInterpretation) in GREY


def _window(header: Any) -> tuple[float, float] | None:
    """Centre and width of the first window; None where there is none that can be used."""
    try:
        centre, width = (
            float(value[0] if isinstance(value, list | tuple) or hasattr(value, "append") else value)
            for value in (header.get("WindowCenter"), header.get("WindowWidth"))
        )
    except (TypeError, ValueError, IndexError):
        return None
    return (centre, width) if np.isfinite([centre, width]).all() and width > 0 else None
